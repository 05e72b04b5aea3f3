"""The tools that a request declares, as OpenAI's API has them. An agent wrote them: nothing about them is sure."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson

from orchestrator.types import Tools

MAX_SCHEMA_BYTES = 64 * 1024  # as of the forms of answers
_KEPT = 8  # what is known of tools; a conversation's messages are read one after the other


class Declared:
    """What readers of calls look up in tools. Each schema is walked once, however many calls name it."""

    def __init__(self, tools: Tools) -> None:
        self.parameters: dict[str, Mapping[str, Any]] = {}  # the schemas of each tool's parameters, by its name
        for tool in tools:
            function = _mapping(_mapping(tool).get("function", tool))
            if isinstance(name := function.get("name"), str):
                self.parameters[name] = _mapping(_mapping(function.get("parameters")).get("properties"))
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that a tool's parameter may have. Empty: the schema does not say."""
        if (name, key) not in self._types:
            schema = self.parameters.get(name, {}).get(key)
            if schema is None:
                return frozenset()
            self._types[name, key] = _types(schema)
        return self._types[name, key]


def arguments_schema(function: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a function's arguments, which are an object whatever it leaves out. None: it is too large to
    ask a service to compile it."""
    if function is None:
        return None
    schema = dict(_mapping(function.get("parameters")))
    if not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema["type"] = "object"
    return schema if len(orjson.dumps(schema)) <= MAX_SCHEMA_BYTES else None


def declared(tools: Tools) -> Declared:
    """What is known of these tools; found once for the same object."""
    return _declared(_Same(tools))


def text_of(tools: Tools) -> bytes:
    """A text that tools share if templates print them alike, but for the order of keys. (Python takes 1, 1.0 and
    True for equal.)"""
    return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)


class _Same:
    """Tools as a key: equal if they are the same object, which is not compared item by item."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def __hash__(self) -> int:
        return id(self.tools)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tools is other.tools


@lru_cache(_KEPT)
def _declared(same: _Same) -> Declared:
    return Declared(same.tools)


def _types(schema: Any) -> frozenset[str]:
    types: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        names = one.get("type")
        own = {kind for kind in (names if isinstance(names, list) else [names]) if isinstance(kind, str)}
        types |= own or ({"object"} if "$ref" in one else own)
        for way in ("anyOf", "oneOf"):
            others = one.get(way)
            waiting += others if isinstance(others, list) else ()
    return frozenset(types)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
