"""Qwen3-Coder: `<function=NAME>` with a `<parameter=KEY>` for each argument, inside `<tool_call>`.

Values are bare text, so the tool's schema says which of them are texts. Others are JSON, except that the model's
own chat template prints Python's True, False and None. The models forget the outer tags now and then, so
`<function=` and `</function>` are enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set

from orchestrator.calls.declared import declared
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
    known = declared(tools)
    source = Source(text)
    yield source.before(_OPENS, _FUNCTION)
    while source.comes(_OPENS, _FUNCTION):
        source.has(_OPENS)
        source.take(_FUNCTION)
        name = source.until(">")
        values: dict[str, str] = {}
        while source.has(_PARAMETER):
            key = source.until(">")
            values[key] = _value(source, known.types(name, key))
        source.take(_FUNCTION_ENDS)
        source.has(_CLOSES)
        members = (f"{_text(key)}: {value}" for key, value in values.items())
        yield name, f"{{{', '.join(members)}}}"
        yield source.before(_OPENS, _FUNCTION)


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    return f"{_OPENS}\n{_FUNCTION}" + ("" if name is None else f"{name}>\n")


def _value(source: Source, types: Set[str]) -> str:
    """The JSON text of the value that comes next. `types`: that it may have; empty: unknown."""
    typed = types and "string" not in types
    if typed and (value := source.json_before(_PARAMETER_ENDS)) is not None:
        return value
    text = source.through(_TEXT_ENDS).removeprefix("\n")
    constant = _CONSTANTS.get(text.strip())
    if constant and (typed or (constant == "null" and "null" in types)):
        return constant
    return _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
