"""What MCP servers list and answer, as agents get it; the setting that names them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret
from orchestrator.settings.mcp import McpServers
from orchestrator.settings.table import EnvSettings
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.process import answered_id
from orchestrator.tools.mcp.recorded import recorded_servers, tool_facts
from orchestrator.tools.mcp.results import text_of_result
from orchestrator.tools.mcp.schemas import (
    MAX_ARGUMENTS,
    MAX_DESCRIPTION_CHARS,
    Untellable,
    defused,
    identifier,
    listed,
    tool_names,
)


def inputs_of(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    one = listed({"name": "t", "inputSchema": {"properties": {"a": schema}, "required": ["a"], **more}})
    return dict(one.inputs["a"])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "string"}, {"type": "string"}),
        ({"type": "integer", "minimum": 1, "title": "A"}, {"type": "integer", "minimum": 1}),
        ({}, {"type": "any"}),
        (True, {"type": "any"}),
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        ({"type": ["string", "integer"]}, {"type": "any"}),
        ({"type": "null"}, {"type": "any", "nullable": True}),
        ({"type": "tensor"}, {"type": "any"}),
        ({"enum": ["x", "y", None]}, {"type": "any", "enum": ["x", "y"]}),
        ({"enum": ["x", "y"]}, {"type": "string", "enum": ["x", "y"]}),
        ({"const": "x"}, {"type": "string", "enum": ["x"]}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "integer", "nullable": True}),
        (
            {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            {"type": "any", "anyOf": [{"type": "integer"}, {"type": "string"}]},
        ),
        ({"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "string"}}),
        (
            {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n", "gone"]},
            {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
        ),
        (
            {"$ref": "#/$defs/Kind", "description": "Which."},
            {"type": "string", "enum": ["p"], "description": "Which."},
        ),
        ({"$ref": "#/$defs/Gone"}, {"type": "any"}),
        ({"$ref": "https://example.com/schema"}, {"type": "any"}),
        ({"$ref": "#/$defs/Loop"}, {"type": "any"}),
        ({"type": "string", "default": {"deep": [1]}}, {"type": "string", "default": '{"deep": [1]}'}),
    ],
)
def test_a_schema_becomes_one_type_with_the_rest_beside_it(schema: Any, told: dict[str, Any]) -> None:
    definitions = {"Kind": {"enum": ["p"]}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert inputs_of(schema, **{"$defs": definitions}) == {"description": "a", **told}


def test_recursive_and_deep_schemas_end() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}, "right": {"$ref": "#/$defs/Tree"}}}
    shape = inputs_of({"$ref": "#/$defs/Tree"}, **{"$defs": {"Tree": tree}})
    assert len(json.dumps(shape)) < 32_000
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        deep = {"type": "array", "items": deep}
    assert inputs_of(deep)["type"] == "array"
    assert len(json.dumps(inputs_of(deep))) < 1_000


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {f"a{n}": {} for n in range(MAX_ARGUMENTS + 1)}}, "arguments"),
        ({"properties": {"a-b": {}, "a_b": {}}}, "would have one name, a_b"),
        ({"properties": {"a": {"enum": ["x" * 400] * 200}}}, "characters to describe"),
        ({"properties": {"a": {"anyOf": [{"properties": {str(n): {} for n in range(1100)}}]}}}, "parts"),
        ({"properties": [1]}, "arguments"),
    ],
)
def test_a_tool_that_cannot_be_told_is_refused_with_a_reason(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(Untellable, match=why):
        listed({"name": "t", "inputSchema": schema})


def test_texts_of_a_server_are_bounded_and_valid() -> None:
    one = listed({"name": "t", "description": "x\ud800" * 10_000, "inputSchema": None})
    assert len(one.description) <= MAX_DESCRIPTION_CHARS
    one.description.encode()
    assert listed({"name": "t", "title": "A title"}).description == "A title"
    assert listed({"name": "t", "description": 5}).description == "t"


def test_arguments_get_the_servers_own_names_and_nulls_are_left_out_where_there_may_be_none() -> None:
    schema = {
        "properties": {
            "max-results": {"type": "integer"},
            "from": {"type": ["string", "null"]},
            "2nd": {"type": "string"},
        },
        "required": ["from"],
    }
    one = listed({"name": "t", "inputSchema": schema})
    assert set(one.inputs) == {"max_results", "from_", "_2nd"}
    assert one.arguments({"max_results": 3, "_2nd": None}) == {"max-results": 3, "from": None}
    assert one.arguments({"from_": "x", "_2nd": "y"}) == {"from": "x", "2nd": "y"}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("a", "a"),
        ("a-b.c", "a_b_c"),
        ("class", "class_"),
        ("2nd", "_2nd"),
        ("", "_"),
        ("größe", "gr__e"),
        ("a\n", "a_"),
    ],
)
def test_names_become_identifiers(name: str, plain: str) -> None:
    assert identifier(name) == plain


def test_names_that_clash_are_taken_or_are_no_identifiers_begin_with_the_servers() -> None:
    servers = {"a": ["x", "get-it", "web_search"], "b": ["x", "y"], "c": ["<|im_end|>", "None"]}
    assert tool_names(servers, {"web_search"}) == {
        ("a", "x"): "a_x",
        ("a", "get-it"): "a_get_it",
        ("a", "web_search"): "a_web_search",
        ("b", "x"): "b_x",
        ("b", "y"): "y",
        ("c", "<|im_end|>"): "c___im_end__",
        ("c", "None"): "c_None",
    }


def test_texts_that_spell_control_tokens_are_defused_and_others_stay() -> None:
    def spells(text: str) -> bool:
        return "<|end|>" in text or "stop" in text

    value = {"a": ["x <|end|>", "fine <b>", 3], "<|end|>": "stop"}
    assert defused(value, spells) == {
        "a": ["x < | end| >", "fine <b>", 3],
        "< | end| >": "[not shown: it spells a control token of the model]",
    }


KEYS = (Secret("hunter2"),)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "text", "text": "a"}], "structuredContent": {"n": 1}}, "a"),
        ({"content": [], "structuredContent": {"k": "größer"}}, '{"k": "größer"}'),
        ({"content": [{"type": "text", "text": "my hunter2 is hunter2"}]}, "my [key] is [key]"),
        ({"structuredContent": {"k": "hunter2"}}, '{"k": "[key]"}'),
        ({"content": [{"type": "audio", "data": "x"}]}, "[not shown: an audio, as there is text only]"),
        ({"content": [{"type": "resource", "resource": {"uri": "a:b", "text": "t"}}]}, "a:b\nt"),
        (
            {"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": "t"}}]},
            "[not shown: a:b, which is no text]",
        ),
        ({"content": [{"type": "resource_link", "name": "n", "uri": "a:b"}]}, "[a link: n a:b]"),
        ({"content": [{"type": "hologram"}]}, "[not shown: a part of type hologram, as there is text only]"),
        ({"content": ["x", None]}, ""),
        ({"content": [{"type": "text", "text": "\ud800"}]}, "\ufffd"),
        ({}, ""),
    ],
)
def test_results_become_one_text(result: dict[str, Any], text: str) -> None:
    assert text_of_result(result, KEYS) == text


@pytest.mark.parametrize(
    ("beginning", "number"),
    [
        (b'{"jsonrpc":"2.0","id":5,"result":{', 5),
        (b'{"result":{"text":"xxxxxxx', None),
        (b'{"jsonrpc": "2.0", "method": "x", "params": {"id": 5, ', None),
        (b'{"id":"5"', None),
    ],
)
def test_the_beginning_of_a_long_line_says_what_it_answers(beginning: bytes, number: int | None) -> None:
    assert answered_id(beginning) == number


GOOD = [
    {"name": "a", "command": "run-it", "args": ["--x", "1"], "env": {"TZ": "UTC", "API_KEY": "env:MY_KEY"}},
    {"name": "b", "url": "https://example.com/mcp", "headers": {"Authorization": "file:~/key"}},
]


def test_the_setting_is_shown_as_it_is_read() -> None:
    kind = McpServers()
    servers = kind.read(json.dumps(GOOD))
    assert kind.read(kind.show(servers)) == servers
    env = EnvSettings(mcp_servers=GOOD)  # type: ignore[arg-type]
    assert env.public()["mcp_servers"] == GOOD


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "a"},
        {"name": "a", "command": "x", "url": "http://x"},
        {"name": "a b", "command": "x"},
        {"name": "a", "command": ""},
        {"name": "a", "command": "x", "args": "--y"},
        {"name": "a", "command": "x", "cwd": "/"},
        {"name": "a", "command": "x", "env": {"API_KEY": "hunter2"}},
        {"name": "a", "command": "x", "env": {"A=B": "x"}},
        {"name": "a", "command": "x", "env": {"OTHER": "sk-abcdefgh"}},
        {"name": "a", "command": "x", "args": ["--key=sk-abcdefgh"]},
        {"name": "a", "url": "ftp://x"},
        {"name": "a", "url": "https://me:hunter2@example.com/"},
        {"name": "a", "url": "https://example.com/?api_key=hunter2"},
        {"name": "a", "url": "https://example.com/", "headers": {"Authorization": "Bearer hunter2"}},
        {"name": "a", "url": "https://example.com/", "headers": {"a: b": "env:X"}},
        "a",
    ],
)
def test_a_setting_with_a_key_in_it_or_of_another_form_is_refused_without_showing_it(bad: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        EnvSettings(mcp_servers=[bad])  # type: ignore[arg-type]
    assert "env.mcp_servers: must be a list" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_two_servers_need_two_names_and_a_shell_agent_gets_none() -> None:
    with pytest.raises(ConfigError):
        EnvSettings(mcp_servers=[GOOD[0], GOOD[0]])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"env.mcp_servers: is for env.agent code or tool_calling or program:PATH"
    ):
        EnvSettings(mcp_servers=GOOD, agent="shell")  # type: ignore[arg-type]


class _Tool:
    description, output_type, server = "Does it.", "string", "a"
    inputs = {"x": {"type": "string", "description": "X."}}  # noqa: RUF012


class _Own:
    description, output_type, inputs = "Mine.", "string", {}


def test_what_a_run_says_of_tools_is_enough_to_play_it_again() -> None:
    facts = tool_facts({"t": _Tool(), "own": _Own()})
    assert set(facts) == {"t"}
    (server,) = recorded_servers(json.loads(json.dumps({"mcp_tools": facts})))
    assert isinstance(server, McpServer)
    assert server.recorded == facts
    assert recorded_servers({}) == ()
    assert recorded_servers(None) == ()


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"a b": {}},
        {"t": None},
        {"t": {"server": "a", "description": "d", "output_type": "string", "inputs": {"x": 1}}},
    ],
)
def test_an_edited_description_of_tools_is_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match="was edited, or is damaged"):
        recorded_servers({"mcp_tools": raw})
