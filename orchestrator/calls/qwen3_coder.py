"""Qwen3-Coder: `<function=NAME>` with a `<parameter=KEY>` for each argument, inside `<tool_call>`.

Values are bare text, so the tool's schema says which of them are texts. Others are JSON, except that the model's
own chat template prints Python's True, False and None. The models forget the outer tags now and then, so
`<function=` and `</function>` are enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.calls.declared import parameters
from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_ENDS, _PARAMETER_ENDS = "</function>", "</parameter>"
# A text may hold a closing tag. The one that ends it comes before another parameter or the function's end.
_TEXT_ENDS = re.compile(rf"\n?{_PARAMETER_ENDS}(?=\s*(?:{_PARAMETER}|{_FUNCTION_ENDS}))")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "null": "null"}


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    schemas = parameters(tools)
    source = Source(text)
    yield source.before(_OPENS, _FUNCTION)
    while source.comes(_OPENS, _FUNCTION):
        source.has(_OPENS)
        source.take(_FUNCTION)
        name = source.until(">")
        values: dict[str, str] = {}
        while source.has(_PARAMETER):
            key = source.until(">")
            values[key] = _value(source, schemas.get(name, {}).get(key))
        source.take(_FUNCTION_ENDS)
        source.has(_CLOSES)
        members = (f"{_text(key)}: {value}" for key, value in values.items())
        yield name, f"{{{', '.join(members)}}}"
        yield source.before(_OPENS, _FUNCTION)


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    return f"{_OPENS}\n{_FUNCTION}" + ("" if name is None else f"{name}>\n")


def _value(source: Source, schema: Any) -> str:
    """The JSON text of the value that comes next."""
    types = _types(schema)
    typed = types and "string" not in types
    if typed and (value := source.json_before(_PARAMETER_ENDS)) is not None:
        return value
    text = source.through(_TEXT_ENDS).removeprefix("\n")
    constant = _CONSTANTS.get(text.strip())
    if constant and (typed or (constant == "null" and "null" in types)):
        return constant
    return _text(text)


def _types(schema: Any) -> set[str]:
    """The JSON types that a value may have. Empty: the schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    for way in ("anyOf", "oneOf"):
        others = schema.get(way)
        found.update(*map(_types, others if isinstance(others, list) else ()))
    return found or ({"object"} if "$ref" in schema else found)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
