"""Hermes, Qwen2.5, Qwen3: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    source = Source(text)
    yield source.before(_OPENS)
    while source.has(_OPENS):
        yield source.call("arguments")
        source.close(_CLOSES)
        yield source.before(_OPENS)


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    return f'{_OPENS}\n{{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "arguments": ')
