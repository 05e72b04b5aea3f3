"""Texts as models write them, format by format: the calls in them, and what is left as text."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.calls.parsed import MAX_CALLS, ParsedText, parsed, same_calls
from orchestrator.types import Call, CallFormat
from tests.unit.calls.printed import tool

TOOLS = [
    tool("look", q="string", n="integer", deep="object", list="array", sure="boolean", none="null"),
    {"type": "function", "function": {"name": "add"}},
]
LOOK = ("look", '{"q": "x"}')
ADD = ("add", "{}")
HARMONY = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"

# format, text, content, calls
READ: list[tuple[CallFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>', "", [LOOK]),
    ("hermes", 'Well.\n<tool_call>{"arguments":{"q": "x"},"name":"look"}</tool_call>\n', "Well.", [LOOK]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2, "", [ADD, ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "", [ADD]),
    ("hermes", 'a<tool_call>{"name": "add", "arguments": {}}</tool_call>b', "a\nb", [ADD]),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"q\\": \\"x\\"}"}</tool_call>', "", [LOOK]),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"q": "</tool_call><tool_call>"}}</tool_call>',
        "",
        [("look", '{"q": "</tool_call><tool_call>"}')],
    ),
    (
        "qwen3_coder",
        "Well.\n\n<tool_call>\n<function=look>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>",
        "Well.",
        [LOOK],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=q>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
        '<parameter=deep>\n{"a":  "</parameter>"}\n</parameter>\n<parameter=list>\n[1]\n</parameter>\n'
        "<parameter=sure>\nTrue\n</parameter>\n<parameter=none>\nNone\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "look",
                '{"q": "7", "n": 7, "deep": {"a":  "</parameter>"}, "list": [1], "sure": true, "none": null}',
            )
        ],
    ),
    (
        "qwen3_coder",
        "<function=look>\n<parameter=n>\nseven\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>",
        "",
        [("look", '{"n": "seven", "other": "7"}')],
    ),
    ("qwen3_coder", "<function=add>\n</function>\n</tool_call>", "", [ADD]),
    (
        "qwen3_coder",
        "<function=look><parameter=q>a\n</parameter>\nb</parameter></function>",
        "",
        [("look", '{"q": "a\\n</parameter>\\nb"}')],
    ),
    ("llama3", '{"name": "look", "parameters": {"q": "x"}}', "", [LOOK]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "add", "arguments": {}}', "", [ADD]),
    ("llama3", 'Well.<|python_tag|>{"name": "add", "parameters": {}}', "Well.", [ADD]),
    (
        "llama3",
        '{"name": "look", "parameters": {"q": "x"}}; {"name": "add", "parameters": {}}',
        "",
        [LOOK, ADD],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"q": "x"}, "id": "a12345678"}]', "", [LOOK]),
    (
        "mistral",
        'Well.[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]',
        "Well.",
        [ADD, ADD],
    ),
    ("mistral", '[TOOL_CALLS]look[ARGS]{"q": "x"}[TOOL_CALLS]add[ARGS]{}', "", [LOOK, ADD]),
    ("mistral", '[TOOL_CALLS]look[CALL_ID]a12345678[ARGS]{"q": "x"}', "", [LOOK]),
    ("mistral", "[TOOL_CALLS]add{} Now I wait.", "Now I wait.", [ADD]),
    ("mistral", '[TOOL_CALLS]look[ARGS]{"q": "[TOOL_CALLS]"}', "", [("look", '{"q": "[TOOL_CALLS]"}')]),
    (
        "deepseek",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"q": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [LOOK, ADD],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}",
        "",
        [LOOK, ADD],
    ),
    ("gpt_oss", f'{HARMONY}{{"q": "x"}}', "", [LOOK]),
    ("gpt_oss", f'{HARMONY}{{"q": "<|call|>"}}<|call|>', "", [("look", '{"q": "<|call|>"}')]),
    ("gpt_oss", ' to=functions.add<|channel|>commentary json<|message|>{}<|call|>', "", [ADD]),
    ("gpt_oss", "<|channel|>analysis to=functions.add code<|message|>{}<|call|>", "", [ADD]),
    ("gpt_oss", "<|channel|>commentary to=add<|message|>{}", "", [ADD]),
    (
        "gpt_oss",
        f'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>'
        f'<|start|>assistant{HARMONY}{{"q": "x"}}',
        "Well.",
        [LOOK],
    ),
    ("gpt_oss", f'Well.<|end|><|start|>assistant{HARMONY}{{"q": "x"}}<|call|>', "Well.", [LOOK]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), READ)
def test_calls_are_read(format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    said = parsed(text, format, TOOLS, 0)
    assert (said.content, [(call.name, call.arguments) for call in said.calls]) == (content, calls)


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'


LEFT: list[tuple[CallFormat, str]] = [
    ("hermes", ""),
    ("hermes", "Well."),
    ("hermes", '{"name": "look", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "none of them", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>add'),
    ("hermes", hermes('{"q": "\\ud800"}')),
    ("hermes", hermes('{"q": ' + "[" * 64 + "]" * 64 + "}")),
    ("hermes", hermes('{"q": ' + "9" * 400 + "}")),
    ("hermes", "<tool_call>{'name': 'look', 'arguments': {}}</tool_call>"),
    *(
        ("hermes", hermes(odd))
        for odd in ("[]", "null", '"x"', '"[]"', "{1: 2}", '{"a": "\n"}', "{} {}", "{}, 1: 2")
    ),
    *(("hermes", hermes(f'{{"a": {odd}}}')) for odd in ("NaN", "-Infinity", "1e999", "9" * 10_000, "1." * 2)),
    ("hermes", hermes('"{\\"a\\": \\"\\ud800\\"}"')),  # a lone surrogate of its own
    ("hermes", hermes('{"a": ' * 100_000)),
    ("hermes", hermes("[" * 100_000 + "]" * 100_000)),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * (MAX_CALLS + 1)),
    ("qwen3_coder", "I write <function=look> for a call."),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=q>\nx\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=q>\nx\n</parameter>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>"),
    ("llama3", '{"name": "Ada", "parameters": {}}'),
    ("llama3", 'Well. {"name": "look", "parameters": {}}'),
    ("llama3", '{"name": "look", "parameters": {}} and so on'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3", "<|python_tag|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]look[ARGS]"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>look\n```json\n{}\n```"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
    ("gpt_oss", "<|channel|>final<|message|>Well."),
    ("gpt_oss", "<|channel|>commentary to=python<|message|>{}"),
    ("gpt_oss", f"{HARMONY}look(1)<|call|>"),
    ("gpt_oss", "to=functions.look"),
]


@pytest.mark.parametrize(("format", "text"), LEFT)
def test_a_text_without_a_whole_call_stays_as_it_is(format: CallFormat, text: str) -> None:
    assert parsed(text, format, TOOLS, 0) == ParsedText(text, ())


def test_ids_are_nine_letters_and_digits_and_differ() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * MAX_CALLS
    ids = [call.id for sequence in (0, 1, 99, 100_000) for call in parsed(text, "hermes", TOOLS, sequence).calls]
    assert len(set(ids)) == 4 * MAX_CALLS
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


@pytest.mark.parametrize(
    "schema", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}]
)
def test_a_value_that_may_be_text_is_text_unless_it_is_null(schema: dict[str, Any]) -> None:
    tools = [{"function": {"name": "look", "parameters": {"properties": {"q": schema, "r": schema}}}}]
    text = "<function=look><parameter=q>\n5\n</parameter><parameter=r>\nnull\n</parameter></function>"
    assert parsed(text, "qwen3_coder", tools, 0).calls[0].arguments == '{"q": "5", "r": null}'


@pytest.mark.parametrize("schema", [{"anyOf": [{"type": "array"}, {"type": "null"}]}, {"$ref": "#/$defs/Place"}])
def test_a_value_that_is_no_text_is_read_as_json(schema: dict[str, Any]) -> None:
    tools = [{"function": {"name": "look", "parameters": {"properties": {"q": schema}}}}]
    text = "<function=look><parameter=q>\n[5]\n</parameter></function>"
    assert parsed(text, "qwen3_coder", tools, 0).calls[0].arguments == '{"q": [5]}'


ODD_TOOLS: list[Any] = [
    None,
    [],
    {},
    {"function": None},
    {"function": {"name": ["look"]}},
    {"function": {"name": "look", "parameters": []}},
    {"function": {"name": "look", "parameters": {"properties": {"q": 1}}}},
    {"function": {"name": "look", "parameters": {"properties": {"q": {"type": [[]], "anyOf": {}}}}}},
]


@pytest.mark.parametrize("odd", ODD_TOOLS)
def test_odd_tools_break_nothing(odd: Any) -> None:
    text = "<function=look><parameter=q>\nx\n</parameter></function>"
    assert [call.name for call in parsed(text, "qwen3_coder", [odd, TOOLS[1]], 0).calls] in ([], ["look"])


def arguments(*texts: str) -> list[Call]:
    return [Call("", "look", text) for text in texts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [true, null]}', '{ "b":[true,null],"a":1.0 }'),
        ('{"a": "ü"}', '{"a": "\\u00fc"}'),
        ('{"a": 1e20}', '{"a": 100000000000000000000}'),
        ("not JSON", "not JSON"),
    ],
)
def test_calls_of_equal_values_are_the_same(one: str, other: str) -> None:
    assert same_calls(arguments(one), arguments(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": null}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ("{}", "not JSON"),
        ('{"a": ' + "[" * 100_000, "{}"),
        ('{"a": ' + "9" * 10_000 + "}", "{}"),
    ],
)
def test_calls_of_other_values_are_not_the_same(one: str, other: str) -> None:
    assert not same_calls(arguments(one), arguments(other))


def test_the_number_and_the_names_of_calls_count_and_ids_do_not() -> None:
    assert same_calls([Call("a", "look", "{}")], [Call("b", "look", "{}")])
    assert not same_calls([Call("a", "look", "{}")], [Call("a", "add", "{}")])
    assert not same_calls(arguments("{}"), arguments("{}", "{}"))


MANY = 100_000


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", hermes('{"a": "' + "<tool_call>" * MANY + '"}')),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}' + " " * MANY * 10 + "x"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * MANY),
        ("hermes", hermes("{" + ", ".join(f'"{i}": 1' for i in range(MANY)) + "}")),
        ("qwen3_coder", "<function=look>" + "<parameter=q>" * MANY),
        ("qwen3_coder", "<function=look><parameter=q>" + "</parameter> " * MANY),
        ("qwen3_coder", "<function=look><parameter=q>" + "</parameter>" + " \n" * MANY * 5),
        ("qwen3_coder", "<function=look>" + '<parameter=deep>{"</parameter>' * MANY + "</function>"),
        (
            "qwen3_coder",
            "<function=look>" + '<parameter=list>["</parameter><parameter=list>","</parameter>' * MANY,
        ),
        ("qwen3_coder", "<function=look>" + "<parameter=list>[[[</parameter>" * MANY + "</function>"),
        ("llama3", '{"name": "add", "parameters": {}};' * MANY),
        ("mistral", "[TOOL_CALLS]add{}" * MANY),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]x{}" * MANY),
        ("mistral", "[TOOL_CALLS]" * MANY),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁calls▁end｜>" * MANY),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>" * MANY),
        ("gpt_oss", "<|start|><|message|>" * MANY),
        ("gpt_oss", "<|start|>assistant to=functions.add<|message|>{}<|call|>" * MANY),
        ("gpt_oss", "<|start|>" + "to=functions.add <|" * MANY + "<|message|>{}"),
    ],
)
def test_long_texts_take_linear_time(format: CallFormat, text: str) -> None:
    assert len(parsed(text, format, TOOLS, 0).calls) <= 1
