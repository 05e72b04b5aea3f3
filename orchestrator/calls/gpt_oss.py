"""gpt-oss ("harmony"): messages of a header and a body, each to a channel or to a function.

A call's header names the function before or behind the channel. The models call from any channel, though they are
told to use `commentary`, and leave out `functions.` in long conversations. Reasoning (`analysis`) is no content.
The text may begin behind a header that was cut off with the reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CALL_ENDS, _ENDS = "<|call|>", ("<|end|>", "<|return|>")
_TO, _FUNCTIONS = "to=", "functions."


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    source = Source(text)
    if not source.comes(_START, _CHANNEL, _TO):
        yield _body(source)
    while not source.ended():
        source.has(_START)
        words = source.until(_MESSAGE).replace("<|", " <|").replace("|>", "|> ").split()
        recipient = next((word.removeprefix(_TO) for word in words if word.startswith(_TO)), None)
        if recipient is not None:
            yield recipient.removeprefix(_FUNCTIONS), source.arguments()
            source.close(CALL_ENDS, *_ENDS)
            continue
        body = _body(source)
        if "analysis" not in words:
            yield body


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    begun = f"{_CHANNEL}commentary {_TO}{_FUNCTIONS}"
    return begun if name is None else f"{begun}{name} <|constrain|>json{_MESSAGE}"


def _body(source: Source) -> str:
    text = source.before(*_ENDS, CALL_ENDS, _START, _CHANNEL)
    any(map(source.has, (*_ENDS, CALL_ENDS)))
    return text
