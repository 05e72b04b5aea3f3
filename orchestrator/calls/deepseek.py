"""DeepSeek V3 and R1: `function`, a separator, the name and a fenced JSON block. V3.1: name, separator, JSON."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGINS, _SEPARATES, _ENDS = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND, _FENCE, _FENCE_ENDS = "function", "```json", "```"


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    source = Source(text)
    yield source.before(_ALL_BEGIN)
    while source.has(_ALL_BEGIN):
        while source.has(_BEGINS):
            yield _call(source)
            source.close(_ENDS)
        source.close(_ALL_END)
        yield source.before(_ALL_BEGIN)


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    begun = _ALL_BEGIN + _BEGINS
    if _FENCE not in template:
        return begun + ("" if name is None else f"{name}{_SEPARATES}")
    return f"{begun}{_KIND}{_SEPARATES}" + ("" if name is None else f"{name}\n{_FENCE}\n")


def _call(source: Source) -> Called:
    name = source.until(_SEPARATES)
    if source.comes("{", '"'):
        return name, source.arguments()
    if name != _KIND:
        raise ValueError("a call of another kind")
    name = source.until(_FENCE)
    arguments = source.arguments()
    source.close(_FENCE_ENDS)
    return name, arguments
