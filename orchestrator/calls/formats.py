"""The formats of tool calls: which one a chat template has, who reads it, and how a call in it begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from orchestrator.calls import deepseek, gpt_oss, hermes, llama3, mistral, qwen3_coder
from orchestrator.calls.source import Reader
from orchestrator.types import CallFormat

READERS: Mapping[CallFormat, Reader] = {
    "hermes": hermes.read,
    "qwen3_coder": qwen3_coder.read,
    "llama3": llama3.read,
    "mistral": mistral.read,
    "deepseek": deepseek.read,
    "gpt_oss": gpt_oss.read,
}
_BEGINNINGS: Mapping[CallFormat, Callable[[str | None, str], str]] = {
    "hermes": hermes.forced,
    "qwen3_coder": qwen3_coder.forced,
    "llama3": llama3.forced,
    "mistral": mistral.forced,
    "deepseek": deepseek.forced,
    "gpt_oss": gpt_oss.forced,
}
# Calls that are JSON objects: where their arguments begin, and what follows them.
_INSIDE = ('"arguments": ', '"parameters": ')
_ENDS: Mapping[CallFormat, str] = {"hermes": "}\n</tool_call>", "llama3": "}", "mistral": "}]"}
# What templates of a format hold, all of it. The first that fits counts.
_SIGNS: tuple[tuple[CallFormat | None, tuple[str, ...]], ...] = (
    (None, ("<tool_call>", "<arg_key>")),  # GLM: tags around keys and values
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("gpt_oss", ("<|channel|>", "functions.")),
    ("llama3", ("ipython", '"parameters"')),
)


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template prints calls in. None: it prints no tools, or calls in another format."""
    if not re.search(r"\btools\b", template):
        return None  # as DeepSeek's own templates, which print calls and never tools
    return next((format for format, signs in _SIGNS if all(sign in template for sign in signs)), None)


def guidable(format: CallFormat | None) -> bool:
    """Whether the JSON of the arguments follows behind `forced` with a name, so that an endpoint that keeps to
    schemas can keep a demanded call to its own."""
    return format not in (None, "qwen3_coder")


def unclosed(format: CallFormat | None, opening: str) -> str:
    """What a demanded call that began like this lacks, if it ends with its arguments, as a schema has it."""
    return _ENDS.get(format, "") if format and opening.endswith(_INSIDE) else ""


def forced(format: CallFormat, name: str | None, template: str = "") -> str:
    """The text that a completion begins with where a call is demanded: of this function, or (None) of any.

    It is put in front of the sampled text before that is parsed. `template`: the chat template, which tells the
    generations of Mistral's and DeepSeek's models apart.
    """
    return _BEGINNINGS[format](name, template)
