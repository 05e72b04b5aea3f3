"""The lenient reader of a run's files, for display: lines may be torn, and fields of any type.

Every function returns a value of the type in its name, or a plain default. None raises because of the content.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson

from orchestrator.run.lines import TextLine, demand_modest, demand_short_talks, loads, text_at
from orchestrator.run.lines import texts as texts_of

MAX_TEXT_CHARS = 32_768
_NO_NUMBERS = (b"{", b"N", b"I")  # of objects, NaN and infinity


@dataclass(slots=True)
class Skipped:
    """How many lines could not be used."""

    rollout_lines: int = 0
    group_lines: int = 0


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(offset, object) of each line; None for a line that is torn or no JSON object. No file: no lines."""
    return ((line.offset, parse(line.text)) for line in lines_from(path) if line.text.strip())


def lines_from(path: Path, start: int = 0) -> Iterator[TextLine]:
    """The lines from offset `start` on. No file: no lines; what cannot be read ends them."""
    try:
        if path.is_file():  # opening a pipe would block
            yield from texts_of(path, start=start)
    except OSError:
        return


def read_at(path: Path, offset: int) -> dict[str, Any]:
    """The object of the line at `offset`; empty if there is none."""
    try:
        return parse(text_at(path, offset)) or {}
    except OSError:
        return {}


def parse(text: bytes) -> dict[str, Any] | None:
    """The object in a line of strict JSON; None for other lines, such as those with NaN or invalid UTF-8."""
    try:
        value = loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def parse_without(text: bytes, arrays: tuple[bytes, ...]) -> dict[str, Any] | None:
    """As `parse`, with empty arrays in place of those that begin so, where they hold only numbers: most of a line
    is ids and log-probs, which take most of the time. What they hold is not looked at."""
    kept, at = [], 0
    for begin, end in _spans(text, arrays):
        kept.append(text[at:begin])
        at = end
    try:
        demand_modest(text)
        value = orjson.loads(b"".join((*kept, text[at:])))
        demand_short_talks(value)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _spans(text: bytes, arrays: tuple[bytes, ...]) -> Iterator[tuple[int, int]]:
    """Where the content of those arrays lies, as far as they follow each other in turns. In a text their quotes
    would be escaped."""
    quote = 0
    for opening in cycle(arrays):
        if (place := text.find(opening, quote)) < 0:
            return
        begin, closing = place + len(opening), b"]" * opening.count(b"[") + b","
        if (quote := text.find(b'"', begin)) < 0:
            return
        end = quote - len(closing)
        if text.startswith(closing, end) and all(text.find(sign, begin, end) < 0 for sign in _NO_NUMBERS):
            yield begin, end


def small_object(path: Path, most_bytes: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file that may be anybody's, read up to a limit; empty if there is none."""
    try:
        if not path.is_file():  # opening a pipe would block
            return {}
        with path.open("rb") as file:
            return parse(file.read(most_bytes)) or {}
    except OSError:
        return {}


def text(value: object, limit: int = MAX_TEXT_CHARS) -> str:
    """The text, or its beginning and how much is missing. Other values are shown as JSON."""
    if value is None:
        return ""
    try:
        shown = value if isinstance(value, str) else orjson.dumps(value).decode()
    except TypeError:  # it is read deeper than it is written
        shown = f"({type(value).__name__}, too deep to show)"
    if len(shown) <= limit:
        return shown
    return f"{shown[:limit]}… [{len(shown) - limit:,} more characters in rollouts.jsonl]"


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e15 and math.isfinite(value) else None


def count(value: object) -> int:
    """A whole number from 0 up; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else 0


def mapping(value: object) -> dict[str, Any]:
    """The object, or an empty one."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of an array."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def texts(value: object, limit: int = 2000) -> list[str]:
    """The elements of an array as texts."""
    return [text(item, limit) for item in value] if isinstance(value, list) else []


def numbers(value: object) -> dict[str, float]:
    """The entries of an object that are finite numbers."""
    values = {name: number(item) for name, item in mapping(value).items()}
    return {name: item for name, item in values.items() if item is not None}
