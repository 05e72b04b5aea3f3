"""`jsonl:PATH`: one JSON object per line; attachments are in its folder."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson

from orchestrator.tasks.base import COLUMNS, NONE, Columns, Source
from orchestrator.tasks.lines import MAX_LINE_BYTES, check_lines, read_lines
from orchestrator.tasks.rows import make_task, one_line
from orchestrator.types import BadTask, Task

_FLAG = "env.dataset"
_LONG_NUMBER = re.compile(rb"[\d.]{16}")
_NAMES = tuple(name.encode() for name in (*COLUMNS, "Question", "Final answer", "file_name"))


def jsonl_tasks(path: Path, *, name: str, columns: Columns = NONE) -> Source:
    """The source. Raises ConfigError if the file cannot be read."""
    check_lines(path, _FLAG, array="a JSON array: write one object per line, as `jq -c '.[]'` does")
    return Source(name, lambda: read_jsonl(path, source=name, flag=_FLAG, columns=columns))


def read_jsonl(path: Path, *, source: str, flag: str, columns: Columns = NONE) -> Iterator[Task | BadTask]:
    """The tasks of one file. Blank lines are skipped; a torn or invalid line is a BadTask."""
    for number, line in read_lines(path, flag):
        place = f"line {number}"
        if line is None:
            yield BadTask(place, f"the line has more than {MAX_LINE_BYTES} bytes")
            continue
        if not line.strip():
            continue
        try:
            row = _row(line)
        except (ValueError, RecursionError) as error:
            yield BadTask(place, f"no JSON: {one_line(error)}")
            continue
        yield make_task(row, source=source, place=place, root=path.parent, columns=columns)


def _row(line: bytes) -> Any:
    """The line's value, its numbers exact. Raises ValueError."""
    # orjson is strict: no NaN, no infinity, valid UTF-8, nesting bounded. But it rounds long numbers, and takes
    # the last of two values with one name.
    row = orjson.loads(line)
    if _LONG_NUMBER.search(line) or any(line.count(b'"%s"' % name) > 1 for name in _NAMES):
        row = json.loads(line, parse_float=_exact, parse_int=_integer, object_pairs_hook=_object)
    return row


def _exact(text: str) -> float | Decimal:
    """A decimal where a float would be another number, or would not show all its digits."""
    value, exact = float(text), Decimal(text)
    return value if Decimal(repr(value)) == exact else exact


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) < sys.get_int_max_str_digits() else Decimal(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{ascii(twice)[:60]} is there twice")
    return members
