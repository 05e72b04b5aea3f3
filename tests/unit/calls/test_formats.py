"""Which format a chat template has, and how a demanded call begins."""

from __future__ import annotations

import pytest

from orchestrator.calls.formats import forced, format_of
from orchestrator.calls.parsed import parsed
from orchestrator.types import CallFormat
from tests.unit.calls.printed import TEMPLATES, tool


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    format, template, _ = TEMPLATES[name]
    assert format_of(template) == format


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{{ message['tool_calls'] }}<｜tool▁calls▁begin｜>",  # prints calls and never tools, as DeepSeek's own
        "{{ tools }}<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>",  # GLM
        "{{ tools }}<|tool_calls_section_begin|>",  # Kimi
    ],
)
def test_other_templates_have_none(template: str) -> None:
    assert format_of(template) is None


# template, what begins a call of any function and what the model adds, the same for the function `look`
BEGUN = {
    "hermes": ('look", "arguments": {"q": "x"}}', '{"q": "x"}}'),
    "qwen3_coder": (
        "look>\n<parameter=q>\nx\n</parameter>\n</function>",
        "<parameter=q>\nx\n</parameter>\n</function>",
    ),
    "llama3": ('look", "parameters": {"q": "x"}}', '{"q": "x"}}'),
    "mistral_array": (' [{"name": "look", "arguments": {"q": "x"}}]', '{"q": "x"}}]'),
    "mistral_args": ('look[ARGS]{"q": "x"}', '{"q": "x"}'),
    "deepseek_v3": ('look\n```json\n{"q": "x"}\n```', '{"q": "x"}\n```'),
    "deepseek_v31": ('look<｜tool▁sep｜>{"q": "x"}', '{"q": "x"}'),
    "gpt_oss": ('look <|constrain|>json<|message|>{"q": "x"}', '{"q": "x"}'),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("function", [None, "look"])
def test_a_demanded_call_is_read_with_its_beginning(name: str, function: str | None) -> None:
    format, template, _ = TEMPLATES[name]
    text = forced(format, function, template) + BEGUN[name][function is not None]
    [call] = parsed(text, format, [tool("look", q="string")], 0).calls
    assert (call.name, call.arguments) == ("look", '{"q": "x"}')


@pytest.mark.parametrize("format", ["mistral", "deepseek"])
def test_a_beginning_needs_no_template(format: CallFormat) -> None:
    assert "look" in forced(format, "look")
