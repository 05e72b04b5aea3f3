"""Checks the arguments that model-written code gives a tool.

The agent sees the texts of the errors: they say what would be valid.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.errors import ToolError
from orchestrator.rules.text import valid

MAX_DEPTH = 16
MAX_VALUES = 10_000
_WHOLE_RANGE = range(-(2**63), 2**63)


def recordable(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, in a form that the record can hold, with valid text.

    Raises ToolError for numbers past 64 bits or not finite, for nesting deeper than MAX_DEPTH, and for more than
    MAX_VALUES values: an empty list of three bytes takes twenty times as much in memory.
    """
    level: list[Any] = [arguments]
    count = 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            raise ToolError(f"the arguments hold more than {MAX_VALUES} values")
        for value in level:
            if isinstance(value, int) and value not in _WHOLE_RANGE:
                raise ToolError("the arguments hold a number of more than 64 bits")
            if isinstance(value, float) and not math.isfinite(value):
                raise ToolError("the arguments hold a number without end")
        nested = (value for value in level if isinstance(value, Mapping | list))
        level = [item for value in nested for item in (value.values() if isinstance(value, Mapping) else value)]
        if not level:
            return {valid(name): _valid(value) for name, value in arguments.items()}
    raise ToolError(f"the arguments are nested more than {MAX_DEPTH} deep")


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, Mapping):
        return {valid(name): _valid(inner) for name, inner in value.items()}
    return [_valid(inner) for inner in value] if isinstance(value, list) else value


def check_names(arguments: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises ToolError for an argument that the tool does not have."""
    for name in arguments:
        if name not in names:
            raise ToolError(f"there is no argument {_quoted(name)}; there are {', '.join(names)}")


def text_argument(arguments: Mapping[str, Any], name: str, max_chars: int) -> str:
    """A text argument without spaces at its ends. Raises ToolError."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"{name} must be text, not {_quoted(value)}")
    text = value.strip()
    if not text:
        raise ToolError(f"{name} is empty")
    if len(text) > max_chars:
        raise ToolError(f"{name} has {len(text)} characters; at most {max_chars} are accepted")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ToolError(f"{name} holds half a character (a lone surrogate)") from None
    return text


def whole_argument(arguments: Mapping[str, Any], name: str, at_least: int, at_most: int) -> int | None:
    """A whole number in the range, also given as 5.0 or "5"; None if it was left out. Raises ToolError."""
    value = arguments.get(name)
    if value is None:
        return None
    number = value
    digits = isinstance(value, str) and value.strip().isdecimal() and len(value) <= 20
    if digits or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not at_least <= number <= at_most:
        raise ToolError(f"{name} must be a whole number from {at_least} to {at_most}, not {_quoted(value)}")
    return number


def _quoted(value: object) -> str:
    """The value on one line of ASCII, shortened. Of collections only the type is shown."""
    if isinstance(value, str | float | bool | None):
        return ascii(value if not isinstance(value, str) else value[:60])
    if isinstance(value, int) and value.bit_length() <= 64:
        return str(value)
    return f"this {type(value).__name__}"
