"""A sampled text as the agent gets it: text and tool calls.

A text with a malformed call has no calls, so the agent gets all of it as text, as servers do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.calls.declared import parameters
from orchestrator.calls.formats import READERS, Format
from orchestrator.calls.source import json_value
from orchestrator.types import Call

MAX_CALLS = 128  # in one completion


@dataclass(frozen=True, slots=True)
class Said:
    """What the model said. Without calls, `content` is the whole text; else the text before and around them."""

    content: str
    calls: tuple[Call, ...]


def parsed(text: str, format: Format, tools: Sequence[Mapping[str, Any]], sequence: int) -> Said:
    """The calls in a text that stands behind the reasoning and has no end token. Never raises.

    A call without a name, of none of the `tools`, or without a JSON object as arguments is malformed.
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
            orjson.loads(arguments)  # strict: what it refuses, such as lone surrogates, could not come back
            if name not in declared or len(calls) == MAX_CALLS:
                return Said(text, ())
            calls.append(Call(_id(sequence, len(calls)), name, arguments))
    except (ValueError, RecursionError):
        return Said(text, ())
    return Said("\n".join(filter(None, pieces)), tuple(calls)) if calls else Said(text, ())


def same_calls(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Whether both have the same names and, as JSON values, the same arguments. Ids, the order of keys and spaces
    do not count: programs write calls back in their own way."""
    return len(one) == len(other) and all(
        a.name == b.name and (a.arguments == b.arguments or _same_json(a.arguments, b.arguments))
        for a, b in zip(one, other, strict=True)
    )


def _same_json(one: str, other: str) -> bool:
    try:
        return _normal(one) == _normal(other)
    except (ValueError, RecursionError):
        return False


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


def _id(sequence: int, index: int) -> str:
    """Nine letters and digits: Mistral's chat templates take no other ids."""
    return f"c{sequence:06x}{index:02x}"
