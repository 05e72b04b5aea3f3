"""A cell of a data set as text: exactly, or as the name of its type, which makes a bad task.

Libraries give dates, decimals, bytes and arrays as objects of many types. `plain` makes them what JSON has;
`cell_text` makes the text of a question, an answer or an id of that.
"""

import math
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from orchestrator.tasks.base import BadRow

FOREIGN = "\0type"  # the only key of an object that stands for a value without exact text
MAX_DIGITS = 300  # of a number; a longer one must be text
_EXACT_FLOATS = 2**53  # below it, each whole number is a float of its own
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # what the record holds as numbers


def foreign(name: str) -> dict[str, str]:
    """Stands for a value whose type is `name`."""
    return {FOREIGN: name}


def plain(value: Any) -> Any:
    """The value with what JSON does not have as text, or as `foreign`. What JSON has stays, not looked into."""
    if type(value).__module__ == "numpy":
        return _without_numpy(value)
    if value is None or isinstance(value, str | bool | int | float | Mapping | list | tuple):
        return value
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return foreign("bytes")
    if isinstance(value, Decimal):
        text = f"{value:f}" if value.is_finite() and abs(value.adjusted()) <= MAX_DIGITS else ""
        return text if 0 < len(text) <= 2 * MAX_DIGITS else foreign("decimal")
    if isinstance(value, date | time) and value == value:  # pandas' missing date is not equal to itself
        return value.isoformat()
    return str(value) if isinstance(value, UUID) else foreign(type(value).__name__)


def _without_numpy(value: Any) -> Any:
    """An array or scalar of numpy, which is not imported for this. A small float has the text that numpy shows."""
    kind = value.dtype.kind
    if value.ndim:
        return [plain(one) for one in value] if value.ndim == 1 else value.tolist()
    if kind == "f":
        return float(str(value))
    if kind == "M":
        return foreign("datetime64") if str(value) == "NaT" else str(value)
    return plain(value.item()) if kind in "biuSU" else foreign(str(value.dtype))


def storable(value: Mapping[Any, Any]) -> dict[str, Any]:
    """An object with everything in it as `plain` makes it, and numbers that the record cannot hold as text.

    Without recursion: a data set may nest deeply.
    """
    root: list[Any] = [value]
    places: list[tuple[Any, Any]] = [(root, 0)]
    while places:
        holder, key = places.pop()
        one = plain(holder[key])
        if isinstance(one, Mapping):
            one = {str(name): inner for name, inner in one.items()}
            places += [(one, name) for name in one]
        elif isinstance(one, list | tuple):
            one = list(one)
            places += [(one, place) for place in range(len(one))]
        elif isinstance(one, float) and not math.isfinite(one):
            raise BadRow(f"metadata holds {one}, which is no number")
        elif isinstance(one, int) and not _MIN_INT <= one <= _MAX_INT:
            one = number_text(one, "metadata")
        holder[key] = one
    return root[0]  # type: ignore[no-any-return]


def cell_text(value: Any, what: str, max_bytes: int) -> str:
    """The text of a cell that `plain` was applied to. Raises BadRow, which names `what` and the type."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_text(value, what)
    if not isinstance(value, str):
        raise BadRow(f"{what} must be text, not {kind_of(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadRow(f"{what} is no valid UTF-8") from None
    if size > max_bytes:
        raise BadRow(f"{what} has {size} bytes, at most {max_bytes} are allowed")
    return value


def number_text(value: float, what: str) -> str:
    """The number as text: 3.0 becomes 3, unless it is too large to be exact."""
    if isinstance(value, int):
        if value.bit_length() > 1024:
            raise BadRow(f"{what} is a number of more than {MAX_DIGITS} digits; write it as text")
        return str(value)
    if not math.isfinite(value):
        raise BadRow(f"{what} is {value}, which is no number")
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT_FLOATS else repr(value)


def kind_of(value: Any) -> str:
    """The type of a cell in words."""
    if isinstance(value, Mapping):
        return str(value[FOREIGN]) if set(value) == {FOREIGN} else "an object"
    return "null" if value is None else type(value).__name__
