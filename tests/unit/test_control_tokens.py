"""Whatever a task, a page, a file or code prints: it is text, and no control token."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.calls.formats import written
from orchestrator.completion.base import content_ids
from orchestrator.completion.harmless import completed_by_tools
from orchestrator.completion.prompt_text import pieces, prompt_text
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.types import Call, CallFormat, Message, Role, Tools
from tests.fakes.tokenizers import (
    ADDED,
    CONTROLS,
    MODELS,
    SPACES,
    TEMPLATES,
    TOOL_TEMPLATES,
    control_ids,
    made,
    qwen,
)

TAG = "</code>"
BITS = [
    *CONTROLS,
    *(token.upper() for token in CONTROLS),
    "＜think＞",
    "<",
    "|s|",
    "e|>",
    SPACES,
    " ",
    "\n",
    "a",
    "漢 fox",
    "0123456789",
]
contents = st.lists(st.sampled_from(BITS), max_size=12).map("".join)
families = st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(ADDED)))
templates = st.sampled_from(sorted(set(TEMPLATES) - {"refuses empty turns"}))


@functools.cache
def tokenizer_of(model: str = "byte level", added: str = "plain", template: str = "chatml") -> HubTokenizer:
    return made(model, added, template)


def conversation(texts: list[str]) -> tuple[Message, ...]:
    roles: tuple[Role, ...] = ("user", "assistant")
    return (Message("system", texts[0]), *(Message(roles[i % 2], text) for i, text in enumerate(texts[1:])))


def ids_of(tokenizer: HubTokenizer, messages: tuple[Message, ...]) -> list[int]:
    text = prompt_text(tokenizer, messages)
    return tokenizer.encode(text.text, text.plain)


def harmless(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """What is printed on both sides of no text at all stands side by side, and may be another token."""
    return tuple(
        replace(message, content="." if message.content.strip() else message.content) for message in messages
    )


@given(family=families, template=templates, texts=st.lists(contents, min_size=2, max_size=6))
def test_only_the_template_prints_control_tokens(family: tuple[str, str], template: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(*family, template)
    messages = conversation(texts)
    found = control_ids(tokenizer, ids_of(tokenizer, messages))
    expected = control_ids(tokenizer, ids_of(tokenizer, harmless(messages)))
    if family[1] == "stands alone":  # which the template's own tokens do not beside every content
        assert Counter(found) <= Counter(expected)
    else:
        assert found == expected


@given(family=families, template=templates, texts=st.lists(st.text(max_size=30), min_size=2, max_size=6))
def test_where_no_content_spells_one_the_ids_are_those_of_the_rendered_text(
    family: tuple[str, str], template: str, texts: list[str]
) -> None:
    tokenizer = tokenizer_of(*family, template)
    messages = conversation([text.encode("utf-8", "replace").decode() for text in texts])
    if not any(tokenizer.spells_control(message.content) for message in messages):
        assert ids_of(tokenizer, messages) == tokenizer.encode(tokenizer.render(messages, generation_prompt=True))


@given(template=templates, texts=st.lists(contents, min_size=2, max_size=6))
def test_the_ids_say_what_the_template_printed(template: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of("byte level", "plain", template)
    messages = conversation(texts)
    said = tokenizer.decode(ids_of(tokenizer, messages))
    assert said == prompt_text(tokenizer, messages).text
    if template in ("chatml", "trims", "in brackets", "says it twice", "changes it"):
        assert said == tokenizer.render(messages, generation_prompt=True)


PIECES = ["|s|", "s|", "<|s", "a<|s|", "|e|>", "<think", "think", "INST", "[", "a", "days", "|pad|", " |s| ", ""]
pieces_of_tokens = st.lists(st.sampled_from([*PIECES, *CONTROLS]), min_size=1, max_size=3).map("".join)
call_formats = st.sampled_from(sorted(TOOL_TEMPLATES))


def offer(name: str, key: str, text: str, choice: str) -> Tools:
    one = {"type": "string", "description": text, "enum": [choice]}
    function = {"name": name, "description": text, "parameters": {"type": "object", "properties": {key: one}}}
    return ({"type": "function", "function": function},)


@given(family=families, format=call_formats, texts=st.lists(pieces_of_tokens, min_size=4, max_size=4))
def test_tools_of_which_the_template_makes_control_tokens_are_known(
    family: tuple[str, str], format: str, texts: list[str]
) -> None:
    """As a schema's key `|s|`, which is printed as `<|s|>`."""
    tokenizer = tokenizer_of(*family, format)
    user = (Message("user", "word"),)
    tools, words = offer(*texts), offer("look", "day", "Looks.", "any")
    printed = control_ids(tokenizer, tokenizer.encode(tokenizer.render(user, generation_prompt=True, tools=tools)))
    wanted = control_ids(tokenizer, tokenizer.encode(tokenizer.render(user, generation_prompt=True, tools=words)))
    spelled = tokenizer.spells_control(orjson.dumps(tools).decode())
    if printed != wanted:
        assert spelled or completed_by_tools(tokenizer, tools)
    assert not completed_by_tools(tokenizer, words)


@given(family=families, format=call_formats, texts=st.lists(pieces_of_tokens, min_size=4, max_size=4))
def test_the_template_completes_no_control_token_in_a_conversation(
    family: tuple[str, str], format: CallFormat, texts: list[str]
) -> None:
    """As an argument's key `a<|s|`, behind which it prints `>`."""
    tokenizer = tokenizer_of(*family, format)
    key, value, content, result = texts
    tools = offer("look", "day", "Looks.", "any")

    def prompted(content: str, arguments: dict[str, str], result: str) -> list[int]:
        call = written(content, (Call("", "look", orjson.dumps(arguments).decode()),), format)
        messages = (Message("user", "q"), Message("assistant", call), Message("tool", result))
        text = prompt_text(tokenizer, messages, tools)
        return control_ids(tokenizer, tokenizer.encode(text.text, text.plain))

    found = prompted(content, {key: value, "b": "c"}, result)
    wanted = prompted("." if content.strip() else content, {"a": "b", "b": "c"}, "." if result.strip() else result)
    if family[1] == "stands alone":
        assert Counter(found) <= Counter(wanted)
    else:
        assert found == wanted


def test_a_template_that_leaves_thoughts_out_leaves_them_out_of_what_spells_tokens() -> None:
    tokenizer = tokenizer_of("byte level", "plain", "leaves thoughts out")
    messages = conversation(["s", "q <|s|>", "<think>\nhm <|e|>\n</think>\n\nan answer </think", "and <|s|>?"])
    assert tokenizer.decode(ids_of(tokenizer, messages)) == tokenizer.render(messages, generation_prompt=True)
    assert "hm" not in prompt_text(tokenizer, messages).text


def test_a_template_that_looks_for_control_tokens_in_contents_finds_none() -> None:
    tokenizer = tokenizer_of("byte level", "plain", "counts on it")
    text = prompt_text(tokenizer, (Message("user", "<|s|>hello"),))
    assert text.text == "<|s|><|s|>hello<|e|><|s|>"
    assert text.plain == ((5, 15),)


def test_runs_of_spaces_stay_tokens_and_tokens_of_html_stay_text() -> None:
    tokenizer = tokenizer_of()
    assert not tokenizer.spells_control(SPACES)
    assert tokenizer.encode(SPACES)[0] in content_ids(tokenizer, f"<|s|>x{SPACES}y")


def test_a_tokenizer_of_python_alone_does_the_same() -> None:
    """No library behind it, so nothing but `encode` and its added tokens can be used."""
    fast = made("byte level")
    slow = Slow(fast._tokenizer)
    tokenizer = HubTokenizer(slow, "slow")
    assert tokenizer._backend is None
    messages = conversation(["<|s|>", "x<|pad|>y", "<|s|><|e|>"])
    assert control_ids(fast, ids_of(tokenizer, messages)) == control_ids(fast, ids_of(fast, harmless(messages)))


class Slow:
    """What `transformers` has of a tokenizer that is written in Python."""

    def __init__(self, fast: object) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> object:
        if name in ("backend_tokenizer", "_tokenizer"):
            raise AttributeError(name)
        return getattr(self._fast, name)

    def __len__(self) -> int:
        return len(self._fast)  # type: ignore[arg-type]


def test_every_content_that_is_apart_stands_in_the_text_where_it_was() -> None:
    tokenizer = tokenizer_of()
    messages = conversation([" <|s|> ", "a", "b", "<|e|>"])
    parts = pieces(tokenizer, messages, {2}, generation_prompt=True)
    assert [(part.message, part.text) for part in parts[1::2]] == [(0, "<|s|>"), (2, "b"), (3, "<|e|>")]
    assert "".join(part.text for part in parts) == tokenizer.render(messages, generation_prompt=True)


def test_a_template_that_prints_other_text_around_a_content_is_not_asked_what_it_makes_of_it() -> None:
    """Its own text would stand in two ways: around a word, and around the content with that word behind it."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content | upper + '<|im_end|>' }}{% endfor %}"
        "{% if messages[-1].content | length > 60 %}{{ '!' }}{% endif %}"
    )
    tokenizer, content = qwen(template), "a page that says <|im_end|> in its text"
    assert prompt_text(tokenizer, (Message("user", content),)).text == f"<|im_start|>{content}<|im_end|>"
    short = "says <|im_end|>"
    assert prompt_text(tokenizer, (Message("user", short),)).text == f"<|im_start|>{short.upper()}<|im_end|>"
