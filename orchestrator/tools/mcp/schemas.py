"""The tools that a server lists, as smolagents describes tools: names and arguments become Python identifiers, a
JSON schema becomes one type per argument with the rest beside it.

What a server lists is text from outside: it is bounded, and what cannot be told is refused by name.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.rules.text import is_name, valid

MAX_TOOLS = 128  # of all servers of a run
MAX_ARGUMENTS = 64
MAX_SCHEMA_CHARS = 32 * 1024  # of one tool, as it is told
MAX_DESCRIPTION_CHARS = 4_000
_MAX_ARGUMENT_CHARS = 1_000  # of one argument's description
_MAX_DEPTH = 6
_MAX_PARTS = 1_000  # of one tool's schema, references followed
_TYPES = ("string", "integer", "number", "boolean", "array", "object")
_KEPT = ("format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
         "minItems", "maxItems", "uniqueItems", "multipleOf", "pattern", "default")  # fmt: skip
_BRACKETS = re.compile(r"[<\[|{]")
_NO_NAME = re.compile(r"\W", re.ASCII)


class Untellable(ValueError):
    """A tool that agents cannot be told of, and why."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One tool as a server lists it. `names`: of the arguments, as agents have them, to the server's own. `nulls`:
    those that may be null there; `demanded`: those that must be given."""

    name: str
    description: str
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    nulls: frozenset[str] = frozenset()
    demanded: frozenset[str] = frozenset()

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments under the server's own names. A null stands for an argument that is left out."""
        sent = {
            self.names[name]: value
            for name, value in given.items()
            if value is not None or name in self.nulls or name in self.demanded
        }
        left_out = (self.names[name] for name in self.demanded & self.nulls if name not in given)
        return {**sent, **dict.fromkeys(left_out)}


def listed(tool: Mapping[str, Any]) -> Listed:
    """One item of `tools/list`. Raises Untellable."""
    schema = tool.get("inputSchema")
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping) or len(properties) > MAX_ARGUMENTS:
        raise Untellable(f"it has more than {MAX_ARGUMENTS} arguments")
    required = schema.get("required")
    demanded = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    reader = _Reader(schema)
    inputs: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    nulls = set()
    for own, raw in properties.items():
        name = identifier(str(own))
        if name in names:
            raise Untellable(f"its arguments {names[name]!a} and {own!a} would have one name, {name}")
        shape, may_be_null = reader.shape(raw)
        text = shape.pop("description", "") or name
        inputs[name] = {"type": shape.pop("type", "any"), "description": text, **shape}
        names[name] = str(own)
        if may_be_null:
            nulls.add(name)
        if may_be_null or own not in demanded:
            inputs[name]["nullable"] = True
    if len(json.dumps(inputs)) > MAX_SCHEMA_CHARS:
        raise Untellable(f"its arguments take more than {MAX_SCHEMA_CHARS} characters to describe")
    description = _text(tool.get("description"), MAX_DESCRIPTION_CHARS) or _text(tool.get("title"), 200)
    return Listed(
        str(tool.get("name")),
        description or str(tool.get("name")),
        inputs,
        names,
        frozenset(nulls),
        frozenset(name for name, own in names.items() if own in demanded),
    )


def defused(value: Any, spells: Callable[[str], bool]) -> Any:
    """A text, or the texts in a JSON value, without what a model's tokenizer takes for control tokens. Templates
    print tools into prompts, and a prompt with a control token too many is refused."""
    if isinstance(value, str):
        if not spells(value):
            return value
        broken = _BRACKETS.sub(r"\g<0> ", value)
        return "[not shown: it spells a control token of the model]" if spells(broken) else broken
    if isinstance(value, Mapping):
        return {defused(key, spells): defused(one, spells) for key, one in value.items()}
    return [defused(one, spells) for one in value] if isinstance(value, list) else value


def identifier(name: str) -> str:
    """The name as a Python identifier."""
    plain = _NO_NAME.sub("_", name)[:64] or "_"
    if not is_name(plain):
        plain = f"{plain}_" if plain.isidentifier() else f"_{plain}"
    return plain


def tool_names(servers: Mapping[str, Iterable[str]], taken: Iterable[str]) -> dict[tuple[str, str], str]:
    """(server, the server's name of a tool) to the name that agents call it by: its own, or SERVER_TOOL where that
    is no identifier, is `taken`, or another server has it too. A name that still comes twice is the caller's to
    refuse."""
    taken = set(taken)
    count = Counter(tool for tools in servers.values() for tool in set(tools))
    return {
        (server, tool): tool
        if is_name(tool) and tool not in taken and count[tool] == 1
        else f"{server}_{_NO_NAME.sub('_', tool)[:64]}"
        for server, tools in servers.items()
        for tool in tools
    }


class _Reader:
    """Reads the schemas of one tool, and follows references inside it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._parts = 0

    def shape(self, raw: Any, depth: int = 0) -> tuple[dict[str, Any], bool]:
        """(what is told of a value, whether it may be null). Raises Untellable."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise Untellable(f"the schema of its arguments has more than {_MAX_PARTS} parts")
        schema = self._followed(raw)
        description = _text(schema.get("description"), _MAX_ARGUMENT_CHARS)
        choices = [self._followed(one) for one in _choices(schema)]
        left = [one for one in choices if one.get("type") != "null"]
        null = len(left) < len(choices)
        if len(left) == 1:
            chosen, inner_null = self.shape(left[0], depth + 1) if depth < _MAX_DEPTH else ({}, False)
            null = null or inner_null
            if description:
                chosen["description"] = description
            return chosen, null
        kind, also_null = _type(schema)
        told: dict[str, Any] = {} if kind is None or left else {"type": kind}
        if description:
            told["description"] = description
        if depth < _MAX_DEPTH:
            told |= self._inside(schema, left, depth)
        return told, null or also_null

    def _inside(self, schema: Mapping[str, Any], choices: list[Mapping[str, Any]], depth: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if choices:
            told["anyOf"] = [self.shape(one, depth + 1)[0] for one in choices]
        if isinstance(values := schema.get("enum"), list):
            told["enum"] = [_plain(value) for value in values if value is not None]
        if "const" in schema:
            told["enum"] = [_plain(schema["const"])]
        if isinstance(schema.get("items"), Mapping):
            told["items"] = self.shape(schema["items"], depth + 1)[0]
        if isinstance(properties := schema.get("properties"), Mapping):
            told["properties"] = {
                _text(name, 100): self.shape(one, depth + 1)[0] for name, one in properties.items()
            }
            if isinstance(required := schema.get("required"), list):
                told["required"] = [_text(name, 100) for name in required if name in properties]
        told |= {key: _plain(schema[key]) for key in _KEPT if schema.get(key) is not None}
        return told

    def _followed(self, raw: Any) -> Mapping[str, Any]:
        """The schema behind references, with what stands beside them."""
        schema: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            place: Any = self._root
            for part in reference.removeprefix("#/").split("/")[:8] if reference.startswith("#/") else ():
                place = place.get(part) if isinstance(place, Mapping) else None
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**place, **beside} if isinstance(place, Mapping) and place is not self._root else beside
        return {}


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            # Of `allOf` one part alone is told: others are mostly limits, which the server checks itself.
            return list(schema[name][: 1 if name == "allOf" else 16])
    return []


def _type(schema: Mapping[str, Any]) -> tuple[str | None, bool]:
    """(the one type that it names, whether null is another)."""
    kinds = schema.get("type")
    if kinds is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        kinds = "string" if isinstance(values, list) and all(isinstance(one, str) for one in values) else None
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    others = [kind for kind in named if kind != "null" and kind in _TYPES]
    return others[0] if len(others) == 1 else None, "null" in named


def _plain(value: Any) -> Any:
    """A value of a schema, shortened; of collections their JSON."""
    if isinstance(value, str):
        return _text(value, 500)
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 53):
        return value
    try:
        return _text(json.dumps(value), 500)
    except (ValueError, RecursionError):
        return None


def _text(value: Any, most: int) -> str:
    return valid(value[:most]).strip() if isinstance(value, str) else ""
