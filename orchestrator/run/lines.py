"""Files of strict JSON, one value per line: written, and read within limits. `repair` mends what a kill left.

A file may come from anybody: a line may be as long as a disk, or short and a thousand times larger in memory.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from orchestrator.errors import ConfigError, OutputError, os_error_as
from orchestrator.rules.text import holds_more, valid
from orchestrator.run.frames import (
    PackedEnd,
    Packer,
    is_compressed,
    line_at,
    lines_from,
    packed_end,
    place_of,
)

MAX_LINE_BYTES = 256 << 20  # we write no longer line
_READ_BYTES = 256 << 10  # of a file at a time: lines are often longer than what is usual
MAX_RUN_FILE_BYTES = 16 << 20  # run.json
MAX_CONTAINERS = 1_000_000  # objects and arrays of a line: in memory an empty one takes twenty times its text
MAX_TALK = 4_000_000  # messages of all prompts of a line; it stores only what each prompt adds to the one before
CHUNK_BYTES = 1 << 20
# JSON allows these unescaped, but many readers take them for line ends.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in ("\u0085", "\u2028", "\u2029")}


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """Strict JSON without a newline at the end. Lone surrogates become U+FFFD, as they cannot be encoded."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        text = orjson.dumps(value, option=option)
    except TypeError as error:
        if "surrogates" not in str(error):
            raise
        text = orjson.dumps(_clean(value), option=option)
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def write_whole(path: Path, value: Any, *, indent: bool = False, fsync: bool = False) -> None:
    """Writes one value as a file, completely or not at all. `fsync` waits for the disk. Raises OSError."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(dumps(value, indent=indent) + b"\n")
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    draft.replace(path)
    if fsync:
        sync_folder(path.parent)


def loads(text: bytes) -> Any:
    """The value of a line. Raises orjson.JSONDecodeError, also if the value, or its conversations written out,
    would take far more memory than the text."""
    demand_modest(text)
    value = orjson.loads(text)
    demand_short_talks(value)
    return value


def demand_modest(text: bytes) -> None:
    """Raises orjson.JSONDecodeError for a line that is too long or has too many objects and arrays."""
    if len(text) > MAX_LINE_BYTES:
        raise orjson.JSONDecodeError(f"over {MAX_LINE_BYTES} bytes", "", 0)
    if len(text) > CHUNK_BYTES and holds_more(text, MAX_CONTAINERS):
        raise orjson.JSONDecodeError(f"over {MAX_CONTAINERS} objects and arrays", "", 0)


def demand_short_talks(line: Any) -> None:
    """Raises orjson.JSONDecodeError for a rollout whose prompts, each written out, would take too much memory."""
    completions = line.get("completions") if isinstance(line, dict) else None
    length = together = 0
    for completion in completions if isinstance(completions, list | tuple) else ():
        if isinstance(completion, dict):
            kept, messages = completion.get("kept"), completion.get("messages")
            length = min(length, abs(kept)) if isinstance(kept, int) else length
            length += len(messages) if isinstance(messages, list | tuple) else 0
            together += length
    if together > MAX_TALK:
        raise orjson.JSONDecodeError(f"over {MAX_TALK} messages in its prompts together", "", 0)


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of a file. `text` includes the newline. `offset`: where it begins, `end`: where the next one does; in
    bytes, of a compressed file as `PackedLine.place`."""

    path: Path
    number: int  # from 1 on
    offset: int
    text: bytes
    end: int

    @property
    def place(self) -> str:
        """Path and number of the line, for error texts."""
        return f"{self.path}:{self.number}"

    @property
    def is_whole(self) -> bool:
        """Whether its writer has come to its end."""
        return self.text.endswith(b"\n")


def texts(path: Path, end: int | None = None, start: int = 0) -> Iterator[TextLine]:
    """Every line of a file, plain or compressed, read one at a time. A plain line longer than MAX_LINE_BYTES comes
    in pieces. An over-long compressed line is returned as an invalid line, like a damaged one.

    `end`: an offset, of a file that grows: lines that begin there or later are not read. `start`: the offset of
    the line to begin with, which gets number 1. A missing file has no lines. Raises OSError.
    """
    try:
        file = path.open("rb", buffering=_READ_BYTES)
    except FileNotFoundError:
        return
    with file:
        if is_compressed(path):
            for number, line in enumerate(lines_from(file, MAX_LINE_BYTES, start), 1):
                if end is not None and line.place >= end:
                    return
                yield TextLine(path, number, line.place, line.text, line.following)
            return
        number, offset = 0, file.seek(start)
        while (end is None or offset < end) and (text := file.readline(MAX_LINE_BYTES + 1)):
            number += 1
            yield TextLine(path, number, offset, text, offset + len(text))
            offset += len(text)


def end_now(path: Path, *, growing: bool) -> int:
    """Where the file ends now; of one that is `growing`, where its last complete line does. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if is_compressed(path):
            return last_whole(file).place if growing else place_of(size)
        return line_start(file.fileno(), size) if growing else size


def text_at(path: Path, offset: int) -> bytes:
    """The line that begins at `offset`. Raises OSError."""
    with path.open("rb") as file:
        if is_compressed(path):
            return line_at(file, MAX_LINE_BYTES, offset)
        file.seek(offset)
        return file.readline(MAX_LINE_BYTES + 1)


class LinesById(Mapping[str, bytes]):
    """Lines of a file by an id, read when they are asked for: only where they begin is kept. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offsets: dict[str, int] = {}

    def __getitem__(self, name: str) -> bytes:
        return text_at(self._path, self.offsets[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets)


class JsonLines:
    """A file that grows by complete lines, compressed if its name says so. Each is flushed; `fsync` also waits for
    the disk.

    A thread of its own makes and writes the lines in the order of the calls, so that a long line or a slow disk
    does not hold up the event loop.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        with os_error_as(ConfigError, f"cannot write {path}"):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._packer = Packer() if is_compressed(path) else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)

    async def append(
        self, values: Callable[[], Iterable[Any]], shorter: Callable[[Any], Any] | None = None
    ) -> None:
        """Appends one line for each of `values()`, all or none. Both functions are called in the thread.

        `shorter`: what is written of a value whose line nobody could read again. The lines are written even if the
        caller is cancelled while it waits. Raises OutputError (disk full, no line that could be read); no partial
        line is left then.
        """
        written = asyncio.wrap_future(self._thread.submit(self._write, values, shorter))
        await asyncio.shield(written)

    def close(self) -> None:
        """Waits until all appended lines are written. Idempotent."""
        self._thread.shutdown()
        if self._packer is not None and not self._file.closed:
            with suppress(OSError):  # a frame that is not closed is read all the same
                self._file.write(self._packer.closed())
        self._file.close()

    def _write(self, values: Callable[[], Iterable[Any]], shorter: Callable[[Any], Any] | None) -> None:
        made, packer = [self._line(value, shorter) + b"\n" for value in values()], self._packer
        was_open = packer is not None and packer.is_open
        lines = b"".join(made) if packer is None else packer.packed(made)
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(lines):
                written += self._file.write(lines[written:]) or 0
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # else the next process sets the torn line aside
                self._file.truncate(start)
            if packer is not None:
                packer.lost(was_open=was_open)
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; make room and go on with --env.resume"
            ) from error

    def _line(self, value: Any, shorter: Callable[[Any], Any] | None) -> bytes:
        """Raises OutputError."""
        text = dumps(value)
        try:
            demand_modest(text)
            demand_short_talks(value)
        except orjson.JSONDecodeError as error:
            if shorter is not None:
                return self._line(shorter(value), None)
            raise OutputError(
                f"cannot write {self.path}: a line of {error.msg} could not be read again"
            ) from error
        return text


def last_whole(file: BinaryIO, before: int | None = None) -> PackedEnd:
    """Where the complete lines of a compressed file end, or those before a place. Raises OSError."""
    end = packed_end(file, MAX_LINE_BYTES, before)
    if end.last is not None and not is_json(end.last.text):
        end = packed_end(file, MAX_LINE_BYTES, end.last.place)
    return end


def is_json(text: bytes) -> bool:
    """Whether it is one value of strict JSON, within the limits."""
    try:
        loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Makes new names in the folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def line_start(fd: int, before: int) -> int:
    """Offset after the last newline in the first `before` bytes; 0 if there is none."""
    while before > 0:
        start = max(0, before - CHUNK_BYTES)
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
