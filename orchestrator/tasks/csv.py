"""`csv:PATH`: a header with the names of `jsonl:` rows, one task per record; attachments are in its folder.

The delimiter is the one of `,` `;` tab and `|` under which the header has a question. A cell is text. `files`
holds a JSON list or names separated by `;`; `metadata`, `limits`, `env` and `grader` hold JSON.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import NONE, BadRow, Columns, Source
from orchestrator.tasks.lines import MAX_LINE_BYTES, check_lines, read_lines
from orchestrator.tasks.rows import make_task, one_line
from orchestrator.types import BadTask, Task

_FLAG = "env.dataset"
_QUESTION = ("question", "Question")
_JSON = ("metadata", "Annotator Metadata", "limits", "env", "grader")
_DELIMITERS = (",", ";", "\t", "|")


def csv_tasks(path: Path, *, name: str, columns: Columns = NONE) -> Source:
    """The source. Raises ConfigError if the file cannot be read or its header is invalid."""
    check_lines(path, _FLAG)
    delimiter = _delimiter(path, columns)
    _header(_reader(path, delimiter), path, columns)
    return Source(name, lambda: _tasks(path, name, columns, delimiter))


def _reader(path: Path, delimiter: str) -> Any:
    # The limit holds for the whole process; its default is below our longest question.
    csv.field_size_limit(MAX_LINE_BYTES)
    return csv.reader(_text_lines(path), strict=True, delimiter=delimiter)


def _delimiter(path: Path, columns: Columns) -> str:
    """The one that the header is written with; a comma if none fits, which is refused later."""
    for delimiter in _DELIMITERS:
        try:
            _header(_reader(path, delimiter), path, columns)
        except ConfigError:
            continue
        return delimiter
    return _DELIMITERS[0]


def _text_lines(path: Path) -> Iterator[str]:
    """Lines as text. Invalid UTF-8 becomes surrogates, so that only its own row is bad."""
    for number, line in read_lines(path, _FLAG):
        if line is None:
            raise ConfigError(f"{_FLAG}: {path} line {number} has more than {MAX_LINE_BYTES} bytes")
        yield line.decode("utf-8", "surrogateescape") + "\n"


def _header(records: Any, path: Path, columns: Columns) -> list[str]:
    """The columns by our names. Raises ConfigError."""
    try:
        header = [column.strip() for column in next(records, [])]
    except csv.Error as error:
        raise ConfigError(f"{_FLAG}: {path} has no readable header: {one_line(error)}") from error
    if absent := sorted(set(columns.values()) - set(header)):
        raise ConfigError(f"env.columns: {path} has no column {absent[0]!a}")
    ours = {theirs: name for name, theirs in columns.items()}
    header = [ours.get(name, f"({name})" if name in columns else name) for name in header]
    if len(set(header)) != len(header) or not set(_QUESTION) & set(header):
        names = ascii(", ".join(header))[:200]
        raise ConfigError(
            f"{_FLAG}: {path} needs different columns and one `question`; it has {names}: rename them, or set "
            "env.columns"
        )
    return header


def _tasks(path: Path, source: str, columns: Columns, delimiter: str) -> Iterator[Task | BadTask]:
    records = _reader(path, delimiter)
    header = _header(records, path, columns)
    while True:
        place = f"line {records.line_num + 1}"
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadTask(place, f"no CSV: {one_line(error)}")
            continue
        if not any(cell.strip() for cell in record):
            continue
        try:
            row = _row(header, record)
        except BadRow as error:
            yield BadTask(place, str(error))
            continue
        yield make_task(row, source=source, place=place, root=path.parent)


def _row(header: list[str], record: list[str]) -> dict[str, Any]:
    if len(record) != len(header):
        raise BadRow(f"{len(record)} cells under a header of {len(header)}")
    row: dict[str, Any] = dict(zip(header, record, strict=True))
    for column in _JSON:
        if row.get(column):
            row[column] = _json(row[column], column)
    if files := row.get("files"):
        is_json = files.lstrip().startswith("[")
        row["files"] = _json(files, "files") if is_json else [n.strip() for n in files.split(";") if n.strip()]
    return row


def _json(text: str, column: str) -> Any:
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError) as error:
        raise BadRow(f"{column} is no JSON: {one_line(error)}") from error
