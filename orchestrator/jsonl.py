"""Strict JSON, one value per line, on disk when `append` returns; and such files after a sudden end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError, OutputError
from orchestrator.text import valid

_CHUNK_BYTES = 1 << 20
# JSON may hold these as they are, but many a reader of lines takes them for the end of one.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in ("\u0085", "\u2028", "\u2029")}


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """Strict JSON without a newline at the end. Lone surrogates become U+FFFD: they are no text."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        text = orjson.dumps(value, option=option)
    except TypeError as error:
        if "surrogates" not in str(error):
            raise
        text = orjson.dumps(_clean(value), option=option)
    for end, escaped in _LINE_ENDS.items():
        text = text.replace(end, escaped)
    return text


def write_whole(path: Path, value: Any, *, indent: bool = False, fsync: bool = False) -> None:
    """One value as a file, whole or not at all; `fsync` waits for the disk. Raises OSError."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(dumps(value, indent=indent) + b"\n")
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    draft.replace(path)
    if fsync:
        _sync_folder(path.parent)


class JsonLines:
    """A file that grows by whole lines. Each is flushed; `fsync` also waits for the disk.

    A thread of its own makes the lines and writes them, in the order in which they were handed over: a long line
    or a slow disk does not hold up the event loop.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)

    async def append(self, values: Callable[[], Iterable[Any]]) -> None:
        """One line for each of `values()`, all or none. `values` is called in the thread.

        The lines are handed over at once and written even if the caller is cancelled while it waits. Raises
        OutputError (disk full) with no half line left behind.
        """
        written = asyncio.wrap_future(self._thread.submit(self._write, values))
        await asyncio.shield(written)

    def close(self) -> None:
        """Waits until everything that was handed over is written. Idempotent."""
        self._thread.shutdown()
        self._file.close()

    def _write(self, values: Callable[[], Iterable[Any]]) -> None:
        lines = b"".join(dumps(value) + b"\n" for value in values())
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(lines):
                written += self._file.write(lines[written:]) or 0
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(start)
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; make room and go on with --env.resume"
            ) from error


def set_torn_end_aside(path: Path) -> int:
    """Moves what a killed writer left unfinished at the end of a file to `<path>.torn`; its bytes.

    Unfinished is what follows the last newline, and a last line that is no JSON: after a power loss a
    line may be there in length only. A file that is not there lacks nothing. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            end = _whole_end(file.fileno())
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return set_end_aside(path, end)


def set_end_aside(path: Path, start: int) -> int:
    """Moves everything from the offset `start` on to `<path>.torn`; its bytes. Raises ConfigError."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if start == size:
                return 0
            with Path(f"{path}.torn").open("ab") as aside:
                file.seek(start)
                aside.write(file.read().removesuffix(b"\n") + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            file.truncate(start)
            return size - start
    except OSError as error:
        raise ConfigError(f"cannot repair {path}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    """A name in it survives a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _whole_end(fd: int) -> int:
    """Offset behind the last line that is whole."""
    end = _line_start(fd, os.fstat(fd).st_size)
    if end == 0:
        return 0
    start = _line_start(fd, end - 1)
    try:
        orjson.loads(os.pread(fd, end - start, start))
    except orjson.JSONDecodeError:
        return start
    return end


def _line_start(fd: int, before: int) -> int:
    """Offset behind the last newline in the first `before` bytes; 0 where there is none."""
    while before > 0:
        start = max(0, before - _CHUNK_BYTES)
        place = os.pread(fd, before - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        before = start
    return 0


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value
