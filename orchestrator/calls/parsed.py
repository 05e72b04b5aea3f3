"""A sampled text as the agent gets it: text and tool calls.

A text with a malformed call has no calls, so the agent gets all of it as text, as servers do.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.calls.declared import declared
from orchestrator.calls.formats import FORMATS
from orchestrator.calls.source import json_value
from orchestrator.types import Call, CallFormat, Tools

MAX_CALLS = 128  # in one completion
MAX_DEPTH = 64  # of arguments; more could not come back, and whether Python reads it depends on who asks


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What the model said. Without calls, `content` is the whole text; else the text before and around them."""

    content: str
    calls: tuple[Call, ...]


def parsed(text: str, format: CallFormat, tools: Tools, sequence: int) -> ParsedText:
    """The calls in a text that stands behind the reasoning and has no end token. Never raises.

    A call without a name, of none of the `tools`, or without a JSON object as arguments is malformed; so is one
    whose arguments are nested too deep, or hold what cannot be sent.
    `sequence`: the completion's number in its episode, for the calls' ids.
    """
    pieces: list[str] = []
    calls: list[Call] = []
    try:
        for part in FORMATS[format].read(text, tools):
            if isinstance(part, str):
                pieces.append(part.strip())
                continue
            name, arguments = part
            value = orjson.loads(arguments)  # strict: what it refuses (lone surrogates) could not come back
            if name not in declared(tools).parameters or len(calls) == MAX_CALLS or is_deeper(value, MAX_DEPTH):
                return ParsedText(text, ())
            calls.append(Call(_id(sequence, len(calls)), name, arguments))
    except (ValueError, RecursionError):
        return ParsedText(text, ())
    return ParsedText("\n".join(filter(None, pieces)), tuple(calls)) if calls else ParsedText(text, ())


def same_calls(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Whether both have the same names and, as JSON values, the same arguments. Ids, the order of keys and spaces
    do not count: programs write calls back in their own way."""
    return plain_calls(one) == plain_calls(other)


def plain_calls(calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
    """The same value for calls that are the same."""
    return tuple((call.name, _plain(call.arguments)) for call in calls)


def _plain(text: str) -> str:
    """Arguments that are no JSON are the same where their texts are."""
    try:
        return _normal(text)
    except (ValueError, RecursionError):
        return text


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
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not level:
            return False
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)


def _id(sequence: int, index: int) -> str:
    """Nine letters and digits: Mistral's chat templates take no other ids."""
    return f"c{sequence:06x}{index:02x}"
