"""Calls as a text of the model: the inverse of `parsed`, for calls that came without their text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from orchestrator.types import Call, CallFormat


def written(content: str, calls: Sequence[Call], format: CallFormat) -> str:
    """What the model would have written: the content, and the calls behind it. Arguments that are no JSON stay as
    they are."""
    if not calls:
        return content
    one, between = _WRITERS[format]
    texts = between.join(one(json.dumps(call.name), call) for call in calls)
    begins, ends = _AROUND.get(format, ("", ""))
    apart = "\n" if content and not content.endswith("\n") else ""
    return f"{content}{apart}{begins}{texts}{ends}"


def _hermes(name: str, call: Call) -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _qwen3_coder(name: str, call: Call) -> str:
    given = _mapping(call.arguments)
    if given is None:
        return f"<tool_call>\n<function={call.name}>\n{call.arguments}"
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _llama3(name: str, call: Call) -> str:
    return f'{{"name": {name}, "parameters": {call.arguments}}}'


def _mistral(name: str, call: Call) -> str:
    return f'{{"name": {name}, "arguments": {call.arguments}}}'


def _deepseek(name: str, call: Call) -> str:
    begins, between, ends = "<｜tool▁call▁begin｜>function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    return f"{begins}{between}{call.name}\n```json\n{call.arguments}\n```{ends}"


def _gpt_oss(name: str, call: Call) -> str:
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}<|call|>"


_WRITERS: Mapping[CallFormat, tuple[Callable[[str, Call], str], str]] = {
    "hermes": (_hermes, "\n"),
    "qwen3_coder": (_qwen3_coder, "\n"),
    "llama3": (_llama3, "; "),
    "mistral": (_mistral, ", "),
    "deepseek": (_deepseek, "\n"),
    "gpt_oss": (_gpt_oss, "<|start|>assistant"),
}
_AROUND: Mapping[CallFormat, tuple[str, str]] = {
    "mistral": ("[TOOL_CALLS] [", "]"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
}
