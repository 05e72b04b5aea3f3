"""The tools that a request declares, as OpenAI's API has them. An agent wrote them: nothing about them is sure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from orchestrator.types import Tools

MAX_SCHEMA_BYTES = 64 * 1024  # as of the forms of answers


def parameters(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The schemas of each tool's parameters, by the tool's name."""
    found = {}
    for tool in tools:
        function = _mapping(_mapping(tool).get("function", tool))
        if isinstance(name := function.get("name"), str):
            found[name] = _mapping(_mapping(function.get("parameters")).get("properties"))
    return found


def arguments_schema(function: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a function's arguments, which are an object whatever it leaves out. None: it is too large to
    ask a service to compile it."""
    if function is None:
        return None
    schema = dict(_mapping(function.get("parameters")))
    if not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema["type"] = "object"
    return schema if len(orjson.dumps(schema)) <= MAX_SCHEMA_BYTES else None


def same_tools(one: Tools, other: Tools) -> bool:
    """Whether templates print them alike, but for the order of keys. Python takes 1, 1.0 and True for equal."""
    return one == other and _text(one) == _text(other)


def _text(tools: Tools) -> bytes:
    return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
