"""Prints the rows of a file or of a hub's data set as lines of JSON, in a process with limited memory.

    python -m orchestrator.tasks.decoder BYTES parquet FILE
    python -m orchestrator.tasks.decoder BYTES hub NAME CONFIG SPLIT this|any

BYTES is the memory allowed in addition to that of the imports. Each line begins with a letter from `decoded`:
first the columns and the number of rows, then rows, or an error. Values that JSON does not have are as
`cells.plain` makes them.
"""

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import pack
from typing import IO, Any, NoReturn

# Set before the libraries are imported. Fewer threads and allocators need less memory.
os.environ |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

import orjson

from orchestrator.tasks.cells import foreign, plain
from orchestrator.tasks.decoded import COLUMNS, ERROR, MIB, ROW, TOO_LONG
from orchestrator.tasks.lines import MAX_LINE_BYTES
from orchestrator.tasks.rows import one_line
from orchestrator.terminal.streams import guard_streams

_BATCH_ROWS = 4
_LARGE = 2.0**53  # from here on, floats leave out whole numbers, and libraries read longer ones as floats
_SMALL_FLOATS = {"float": "<f", "halffloat": "<e"}
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def main(limit_bytes: int, kind: str, *arguments: str) -> NoReturn:
    """Exits with 0 after all rows, with 1 after an error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to standard error
    guard_streams()
    code = 1
    try:
        columns, size, rows = (_parquet if kind == "parquet" else _hub)(limit_bytes, *arguments)
        output.write(COLUMNS + orjson.dumps([columns, size]) + b"\n")
        output.flush()
        _give(rows, output)
        code = 0
    except BrokenPipeError:  # the reader wants no more rows
        os._exit(0)
    except MemoryError:
        output.write(ERROR + orjson.dumps(f"reading takes more than {limit_bytes // MIB} MiB of memory") + b"\n")
    except Exception as error:  # the libraries raise anything
        output.write(ERROR + orjson.dumps(one_line(error)) + b"\n")
    output.flush()
    os._exit(code)  # without waiting for threads of a library


def _give(rows: Iterable[Any], output: IO[bytes]) -> None:
    for row in rows:
        try:
            line = orjson.dumps(row, default=plain, option=_JSON)
        except (TypeError, ValueError):  # lone surrogates, too deep nesting
            line = orjson.dumps([type(row).__name__])
        output.write(ROW + line + b"\n" if len(line) < MAX_LINE_BYTES else TOO_LONG + b"\n")


def _cells(table: Any) -> dict[str, Any]:
    """The only row of an Arrow table."""
    names = table.schema.names
    if len(set(names)) != len(names):
        raise ValueError(f"two columns have the name {next(name for name in names if names.count(name) > 1)!a}")
    return {name: _cell(table.column(place)) for place, name in enumerate(names)}


def _cell(column: Any) -> Any:
    """The only value of a column; where it has no exact one in Python, the name of its type."""
    kind = column.type
    try:
        if getattr(kind, "unit", "") == "ns":  # Python's times have microseconds
            import pyarrow

            coarse = pyarrow.time64("us") if "time64" in str(kind) else pyarrow.timestamp("us", kind.tz)
            column = column.cast(coarse)  # raises where it would lose something
        value = _exact(column[0].as_py(), kind)
    except (ValueError, OverflowError, AttributeError):  # a time that Python does not have, a duration
        return foreign(str(kind))
    if isinstance(value, float) and abs(value) >= _LARGE and value.is_integer():
        return foreign(f"{kind}, which may have rounded it")
    return value


def _exact(value: Any, kind: Any) -> Any:
    """The value, with small floats as they are written: 0.1 and not 0.10000000149011612."""
    name = str(kind)
    if value is None:
        return None
    if name in _SMALL_FLOATS:
        return _shortest(value, _SMALL_FLOATS[name])
    if name.startswith(("list", "large_list", "fixed_size_list")):
        return [_exact(one, kind.value_type) for one in value]
    if name.startswith("struct"):
        return {field.name: _exact(value[field.name], field.type) for field in kind}
    return value


def _shortest(value: float, code: str) -> float:
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next(float(text) for text in texts if value != value or pack(code, float(text)) == pack(code, value))


def _limit(limit_bytes: int) -> None:
    """Limits the memory that is written to: mapped files and reserved addresses do not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used_bytes = int(fields["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + limit_bytes, resource.RLIM_INFINITY))


def _parquet(limit_bytes: int, file: str) -> tuple[list[str], int | None, Iterator[Any]]:
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    _limit(limit_bytes)
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False)

    def rows() -> Iterator[Any]:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for number in range(batch.num_rows):  # one by one: every row may hold a value stored only once
                yield _cells(batch.slice(number, 1))

    return list(table.schema_arrow.names), table.metadata.num_rows, rows()


def _hub(
    limit_bytes: int, name: str, config: str, split: str, only: str
) -> tuple[list[str] | None, int | None, Iterator[Any]]:
    """`only`: `any` takes the only split of a data set that does not have this one."""
    import datasets
    import pyarrow

    pyarrow.set_cpu_count(1)
    _limit(limit_bytes)
    splits = datasets.load_dataset(name, config or None, streaming=True)
    if split not in splits and only == "any" and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        raise ValueError(f"it has no such split, but {', '.join(map(str, splits))}")
    rows = splits[split]
    split_info = (rows.info.splits or {}).get(split)
    tables = (_cells(table) for table in rows.with_format("arrow"))
    return rows.column_names, (split_info.num_examples or None) if split_info is not None else None, tables


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
