"""`jsonl:PATH`: one JSON object per line; attachments are in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from orchestrator.tasks.base import NONE, Columns, Source, renamed
from orchestrator.tasks.lines import MAX_LINE_BYTES, check_readable, read_lines
from orchestrator.tasks.rows import make_task, one_line
from orchestrator.types import BadTask, Task

_FLAG = "env.dataset"


def jsonl_tasks(path: Path, *, name: str, columns: Columns = NONE) -> Source:
    """The source. Raises ConfigError if the file cannot be read."""
    check_readable(path, _FLAG)
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
            # orjson is strict: no NaN, no infinity, valid UTF-8, nesting bounded.
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield BadTask(place, f"no JSON: {one_line(error)}")
            continue
        yield make_task(renamed(row, columns), source=source, place=place, root=path.parent)
