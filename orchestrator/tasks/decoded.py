"""Rows that a library decodes: parquet files, the hub's data sets. Read in a process whose memory is limited.

What a few kilobytes of a compressed file become is known only when they are decompressed, and the libraries know
no limit. So they run in a process of their own (`decoder`), and give one row after the other. Memory beyond the
limit is that process's end, and one line here.
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
MEMORY_MIB = {"parquet": 256, "hub": 1024}  # for one row group of text; a hub's may hold pictures
COLUMNS, ROW, TOO_LONG, ERROR = b"C", b"R", b"L", b"E"  # what a line of the decoder begins with


class DecodeError(Exception):
    """Why rows cannot be read, in one line."""


class Decoded:
    """The rows of `decoder` called with these arguments, the first one being a kind of it.

    The data are opened at once. Raises DecodeError. `columns`: their names, None where only reading would tell.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: _Process | None = _Process(arguments)
        self.columns: list[str] | None = self._process.columns

    def rows(self) -> Iterator[dict[str, Any] | None]:
        """From the beginning each time; None for a row over MAX_LINE_BYTES. Raises DecodeError."""
        process, self._process = self._process or _Process(self._arguments), None
        try:
            while (line := process.line()) is not None:
                yield None if line[:1] == TOO_LONG else orjson.loads(line[1:])
        finally:
            process.end()

    def close(self) -> None:
        """Where nobody wants the rows. Idempotent."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One decoder. It ends by itself when nobody reads what it says."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._limit_mib = MEMORY_MIB[arguments[0]]
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "orchestrator.tasks.decoder", str(self._limit_mib * MIB), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a ^C is the orchestrator's to handle
        )
        assert self._process.stdout is not None
        self._said: IO[bytes] = self._process.stdout
        try:
            line = self.line() or COLUMNS + b"null"
            self.columns: list[str] | None = orjson.loads(line[1:])
        except BaseException:
            self.end()
            raise

    def line(self) -> bytes | None:
        """The next one; None at the end. Raises DecodeError."""
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
