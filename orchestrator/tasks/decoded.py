"""Rows that a library decodes (parquet files, the hub's data sets), read in a process with limited memory.

How large a few kilobytes of a compressed file become is known only after decompression, and the libraries have no
limit. So they run in a process of their own (`decoder`), which gives one row after the other. If it needs more
memory than the limit, it ends, and a DecodeError is raised here.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

import orjson

from orchestrator.tasks.lines import MAX_LINE_BYTES

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
        self._arguments = arguments
        self._process: _Process | None = _Process(arguments)
        self.columns: list[str] | None = self._process.columns
        self.size: int | None = self._process.size

    def rows(self) -> Iterator[dict[str, Any] | None]:
        """All rows from the start; None for a row over MAX_LINE_BYTES. Raises DecodeError."""
        process, self._process = self._process or _Process(self._arguments), None
        try:
            while (line := process.line()) is not None:
                yield None if line[:1] == TOO_LONG else orjson.loads(line[1:])
        finally:
            process.end()

    def close(self) -> None:
        """Ends the decoder if the rows are not needed. Idempotent."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One decoder process. It ends by itself once its output is not read any more."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._limit_mib = MEMORY_MIB[arguments[0]]
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "orchestrator.tasks.decoder", str(self._limit_mib * MIB), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # only the orchestrator gets a ^C
        )
        assert self._process.stdout is not None
        self._said: IO[bytes] = self._process.stdout
        try:
            line = self.line() or COLUMNS + b"[null, null]"
            self.columns: list[str] | None
            self.size: int | None
            self.columns, self.size = orjson.loads(line[1:])
        except BaseException:
            self.end()
            raise

    def line(self) -> bytes | None:
        """The next line; None at the end. Raises DecodeError."""
        line = self._said.readline(MAX_LINE_BYTES + 2)
        if line.startswith(ERROR):
            raise DecodeError(str(orjson.loads(line[1:])))
        if line.endswith(b"\n"):
            return line
        if code := self._process.wait():
            raise DecodeError(f"their reader ended with {_how(code)}, it may use {self._limit_mib} MiB of memory")
        return None

    def end(self) -> None:
        """Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._said.close()


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name
