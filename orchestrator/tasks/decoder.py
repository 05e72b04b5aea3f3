"""Gives the rows of a file or a hub's data set as lines of JSON, in a process whose memory is limited.

    python -m orchestrator.tasks.decoder BYTES parquet FILE
    python -m orchestrator.tasks.decoder BYTES hub NAME CONFIG SPLIT

BYTES come on top of what its imports take. A line begins with a letter of `decoded`: the columns first, then the
rows, or an error. What JSON does not know (bytes, dates, decimals) becomes a list of its type's name, which is no
text for whoever wants one.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

# Before the libraries are imported. One thread has one stack; the system's allocator takes what is wanted.
os.environ |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

import orjson

from orchestrator.tasks.decoded import COLUMNS, ERROR, MIB, ROW, TOO_LONG
from orchestrator.tasks.lines import MAX_LINE_BYTES
from orchestrator.tasks.rows import one_line
from orchestrator.terminal.streams import guard_streams

_BATCH_ROWS = 4
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def main(limit_bytes: int, kind: str, *arguments: str) -> int:
    """0: all rows were given; 1: an error was."""
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no row
    guard_streams()
    try:
        columns, rows = (_parquet if kind == "parquet" else _hub)(limit_bytes, *arguments)
        said.write(COLUMNS + orjson.dumps(columns) + b"\n")
        said.flush()
        _give(rows, said)
    except BrokenPipeError:  # nobody wants more
        os._exit(0)
    except MemoryError:
        said.write(ERROR + orjson.dumps(f"reading takes more than {limit_bytes // MIB} MiB of memory") + b"\n")
        said.flush()
        os._exit(1)
    except Exception as error:  # the hub, the network, the files: libraries raise them all
        said.write(ERROR + orjson.dumps(one_line(error)) + b"\n")
        said.flush()
        os._exit(1)  # not waiting for threads of a library
    said.flush()
    os._exit(0)


def _give(rows: Iterable[Any], said: IO[bytes]) -> None:
    for row in rows:
        try:
            line = orjson.dumps(row, default=_foreign, option=_JSON)
        except (TypeError, ValueError):  # halves of characters, nesting beyond all measure
            line = orjson.dumps(_foreign(row))
        said.write(ROW + line + b"\n" if len(line) < MAX_LINE_BYTES else TOO_LONG + b"\n")


def _foreign(value: object) -> list[str]:
    return [type(value).__name__]


def _limit(limit_bytes: int) -> None:
    """Of memory that is written to: mapped files and reserved addresses cost nothing."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(told["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, resource.RLIM_INFINITY))


def _parquet(limit_bytes: int, file: str) -> tuple[list[str], Iterator[Any]]:
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    _limit(limit_bytes)
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False)

    def rows() -> Iterator[Any]:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for number in range(batch.num_rows):  # one by one: a value may be in every row and once in the file
                yield from batch.slice(number, 1).to_pylist()

    return list(table.schema_arrow.names), rows()


def _hub(limit_bytes: int, name: str, config: str, split: str) -> tuple[list[str] | None, Iterator[Any]]:
    import datasets
    import pyarrow

    pyarrow.set_cpu_count(1)
    _limit(limit_bytes)
    rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
    return rows.column_names, iter(rows)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
