"""Rows that a library decodes (parquet files, the hub's data sets), read in a process with limited memory.

How large a few kilobytes of a compressed file become is known only after decompression, and the libraries have no
limit. So they run in a process of their own (`decoder`), which gives one row after the other. If it needs more
memory than the limit, it ends, and a DecodeError is raised here.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import Columns
from orchestrator.tasks.lines import MAX_LINE_BYTES
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task

MIB = 1 << 20
MEMORY_MIB = {"parquet": 256, "hub": 1024}  # enough for a row group of text; the hub's may hold pictures
COLUMNS, ROW, TOO_LONG, ERROR = b"C", b"R", b"L", b"E"  # first byte of a line of the decoder


class DecodeError(Exception):
    """Rows cannot be read. The text is one line."""


class Decoded:
    """The rows of a `decoder` with these arguments: `parquet` or `hub`, then what it needs.

    The data are opened at once. Raises DecodeError. `columns`: names of the columns, `size`: how many rows there
    are; None: unknown before reading.
    """

    def __init__(self, *arguments: str) -> None:
        self._limit_mib = MEMORY_MIB[arguments[0]]
        self._command = [sys.executable, "-P", "-m", "orchestrator.tasks.decoder", str(self._limit_mib * MIB)]
        self._command += arguments
        self._opened: Generator[bytes, None, None] | None = self._lines()  # for the first reading
        header = next(self._opened, COLUMNS + b"[null, null]")
        self.columns: list[str] | None
        self.size: int | None
        self.columns, self.size = orjson.loads(header[1:])

    def rows(self) -> Iterator[dict[str, Any] | None]:
        """All rows from the start; None for a row over MAX_LINE_BYTES. Raises DecodeError."""
        lines, self._opened = self._opened, None
        if lines is None:
            lines = self._lines()
            next(lines, None)
        with closing(lines):
            for line in lines:
                yield None if line[:1] == TOO_LONG else orjson.loads(line[1:])

    def tasks(
        self,
        source: str,
        columns: Columns,
        failure: str,
        *,
        prefix: str = "",
        located: Callable[[dict[str, Any]], tuple[dict[str, Any], Path | None]] = lambda row: (row, None),
    ) -> Iterator[Task | BadTask]:
        """The rows as tasks. `prefix`: of the names of places. `located`: a row, and the folder of its files.
        Raises ConfigError, which begins with `failure`."""
        number = 0
        try:
            for number, row in enumerate(self.rows(), 1):
                place = f"{prefix}row {number}"
                if row is None:
                    yield BadTask(place, f"the row has more than {MAX_LINE_BYTES} bytes")
                else:
                    row, root = located(row)
                    yield make_task(row, source=source, place=place, root=root, columns=columns)
        except DecodeError as error:
            raise ConfigError(f"{failure} after row {number}: {error}") from error

    def close(self) -> None:
        """Ends the decoder if the rows are not needed. Idempotent."""
        if self._opened is not None:
            self._opened.close()

    def _lines(self) -> Generator[bytes, None, None]:
        """What a new decoder prints; it ends with this generator. Raises DecodeError."""
        process = subprocess.Popen(  # noqa: S603 - our own module
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # only the orchestrator gets a ^C
        )
        assert process.stdout is not None
        try:
            while (line := process.stdout.readline(MAX_LINE_BYTES + 2)).endswith(b"\n"):
                if line.startswith(ERROR):
                    raise DecodeError(str(orjson.loads(line[1:])))
                yield line
            if code := process.wait():
                end = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                raise DecodeError(f"their reader ended with {end}, it may use {self._limit_mib} MiB of memory")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
