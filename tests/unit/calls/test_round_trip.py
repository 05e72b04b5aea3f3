"""What a chat template prints of calls is read as those calls. No text is lost, and none breaks anything."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.calls.formats import FORMATS
from orchestrator.calls.parsed import parsed, same_calls
from orchestrator.types import Call, CallFormat
from tests.unit.calls.printed import TEMPLATES, Calls, printed, tool

MARKS = (
    *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=q>", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";", "```", "```json\n", '"', "\\", "{", "}", "["),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "to=functions.look", "analysis"),
    *(
        '{"name": "look", "arguments": {"q": 1}}',
        '{"name": "look", "parameters": {}}',
        '{"q": 1}',
        "look",
        "\n",
        ",",
    ),
)
MARKED = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=12).map("".join)
TEXTS = st.text() | MARKED
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,15}", fullmatch=True)
KEYS = st.from_regex(r"\w{1,8}", fullmatch=True)
KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}


def closes_early(value: Any) -> bool:
    """Whether bare text looks like its own end, so that nobody can tell (Qwen3-Coder)."""
    return isinstance(value, str) and re.search(r"</parameter>\s*(<parameter=|</function>)", value) is not None


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_printed_calls_are_read(name: str, data: st.DataObject) -> None:
    format = TEMPLATES[name][0]
    bare = format == "qwen3_coder"
    values = JSON.filter(lambda value: not closes_early(value)) if bare else JSON
    arguments = st.dictionaries(KEYS if bare else TEXTS, values, max_size=3)
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    calls: Calls = [(called, data.draw(arguments)) for called in names]
    content = data.draw(st.sampled_from(["", "Well.", "Über { 5 }"])) if format != "llama3" else ""
    tools = [tool(called, **{key: KINDS[type(value)] for key, value in given.items()}) for called, given in calls]

    said = parsed(printed(name, content, calls), format, tools, 7)

    wanted = [Call("", called, json.dumps(given)) for called, given in calls]
    assert same_calls(said.calls, wanted)
    assert said.content == content


TOOLS = [tool("look", q="integer")]


@pytest.mark.parametrize("format", FORMATS)
@given(text=st.text(st.characters()) | MARKED)
def test_no_text_is_lost(format: CallFormat, text: str) -> None:
    said = parsed(text, format, TOOLS, 0)
    if not said.calls:
        assert said.content == text
    for call in said.calls:
        assert call.name == "look"
        assert isinstance(json.loads(call.arguments), dict)
