"""A sampled text as the agent gets it: text and tool calls.

A text with a malformed call has no calls, so the agent gets all of it as text, as servers do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.calls.declared import parameters
from orchestrator.calls.formats import READERS
from orchestrator.calls.source import json_value
from orchestrator.types import Call, CallFormat, Tools

MAX_CALLS = 128  # in one completion
MAX_DEPTH = 64  # of arguments; more could not come back, and whether Python reads it depends on who asks
# How much longer the same arguments may be in other words: escapes take up to twelve times, indents some more.
_MOST_LONGER, _LITTLE_CHARS = 16, 4096


@dataclass(frozen=True, slots=True)
class Said:
    """What the model said. Without calls, `content` is the whole text; else the text before and around them."""

    content: str
    calls: tuple[Call, ...]


def parsed(text: str, format: CallFormat, tools: Tools, sequence: int) -> Said:
    """The calls in a text that stands behind the reasoning and has no end token. Never raises.

    A call without a name, of none of the `tools`, or without a JSON object as arguments is malformed; so is one
    whose arguments are nested too deep, or hold what cannot be sent.
    `sequence`: the completion's number in its episode, for the calls' ids.
    """
    pieces: list[str] = []
    calls: list[Call] = []
    try:
        declared = parameters(tools)
        for part in READERS[format](text, tools):
            if isinstance(part, str):
                pieces.append(part.strip())
                continue
            name, arguments = part
            value = orjson.loads(arguments)  # strict: what it refuses (lone surrogates) could not come back
            if name not in declared or len(calls) == MAX_CALLS or is_deeper(value, MAX_DEPTH):
                return Said(text, ())
            calls.append(Call(_id(sequence, len(calls)), name, arguments))
    except (ValueError, RecursionError):
        return Said(text, ())
    return Said("\n".join(filter(None, pieces)), tuple(calls)) if calls else Said(text, ())


def same_calls(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Whether both have the same names and, as JSON values, the same arguments. Ids, the order of keys and spaces
    do not count: programs write calls back in their own way."""
    return Compared(one).same(Compared(other))


class Compared:
    """Calls to be compared with many others: each is read once at most, and only if it could be the same.

    Whoever asks for completions chooses how long arguments are, and reading them holds up all rollouts.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        self._read: dict[int, str | None] = {}

    def same(self, other: Compared) -> bool:
        """See `same_calls`."""
        return [call.name for call in self._calls] == [call.name for call in other._calls] and all(
            self._same(other, place) for place in range(len(self._calls))
        )

    def _same(self, other: Compared, place: int) -> bool:
        one, two = self._calls[place].arguments, other._calls[place].arguments
        if one == two:
            return True
        if max(len(one), len(two)) > _MOST_LONGER * min(len(one), len(two)) + _LITTLE_CHARS:
            return False
        value = self._normal(place)
        return value is not None and value == other._normal(place)

    def _normal(self, place: int) -> str | None:
        """None: it is not JSON."""
        if place not in self._read:
            try:
                self._read[place] = _normal(self._calls[place].arguments)
            except (ValueError, RecursionError):
                self._read[place] = None
        return self._read[place]


def _normal(text: str) -> str:
    """The JSON text that all texts of an equal value have."""
    return json.dumps(_whole(json_value(text)[0]), sort_keys=True)


def _whole(value: Any) -> Any:
    """`value` with 1 in place of 1.0, as JavaScript writes it up to that size."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested deeper than this."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(one, levels - 1) for one in inner)


def _id(sequence: int, index: int) -> str:
    """Nine letters and digits: Mistral's chat templates take no other ids."""
    return f"c{sequence:06x}{index:02x}"
