"""Writes the files a rollout left, which the sandbox sends as a stream, into a folder, and checks all of it.

sandbox/pid1/outbox.py defines the stream's format. A path becomes a file only if it stays below the folder; the
format has no links or devices. Bytes are written to disk as they come; none are kept in memory.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from orchestrator.errors import LaunchError, ProtocolError
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Output, OutputFile

MAX_DEPTH = 8
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_PIECES = 64  # plus one for each PIECE_BYTES of the allowed bytes
PIECE_BYTES = 128 * 1024
# Errors that no policy can choose. What a file system thinks of a name is not among them: the policy chose it.
OF_THE_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE))

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputRule:
    """Where files go, how many, and how large together. Each rollout gets a folder below `folder`."""

    folder: Path
    max_files: int
    max_bytes: int


class OutputIntake:
    """Takes one stream of files, until `finish`. `rule` None: no files are asked for."""

    def __init__(self, rule: OutputRule | None, rollout_id: str) -> None:
        self.rule = rule
        self.failure: LaunchError | None = None  # why the disk cannot keep the files
        self._rollout_id = rollout_id
        self._receiver: OutputReceiver | None = None
        self._over = False
        self._sent = asyncio.Event()
        self._lock = asyncio.Lock()  # held while files are written; after `finish` or `discard` none are

    async def take(self, pieces: AsyncIterator[bytes]) -> None:
        """Takes the stream. Raises ProtocolError."""
        if self.rule is None or self._receiver is not None:
            raise ProtocolError("no output is asked for" if self.rule is None else "output that was sent already")
        receiver = self._receiver = OutputReceiver(self.rule, self._rollout_id)
        try:
            await self._take(receiver, pieces, self.rule.max_bytes // PIECE_BYTES + MAX_PIECES)
        finally:
            self._sent.set()

    async def _take(self, receiver: OutputReceiver, pieces: AsyncIterator[bytes], left: int) -> None:
        async for content in pieces:
            left -= 1
            if left < 0:
                raise ProtocolError("output in too many pieces")
            async with self._lock:
                if self._over:
                    raise ProtocolError("the episode has ended already")
                try:
                    await _blocking(lambda: receiver.feed(content))  # noqa: B023 - done before the next piece
                except OSError as error:
                    self._complain(error)
                    raise ProtocolError("the output cannot be kept") from error

    async def sent(self) -> None:
        """Waits until the stream has ended or broken off."""
        await self._sent.wait()

    async def finish(self) -> Output | None:
        """The files received; None: no stream came. Afterwards nothing more is taken. Idempotent."""
        async with self._lock:
            over, self._over = self._over, True
            if over or self._receiver is None:
                return None
            try:
                return await _blocking(self._receiver.finish)
            except OSError as error:
                self._complain(error)
                return Output(complete=False)

    async def discard(self) -> None:
        """Removes what was received, unless `finish` was called. Afterwards nothing more is taken. Idempotent."""
        async with self._lock:
            over, self._over = self._over, True
            if not over and self._receiver is not None:
                try:
                    await _blocking(self._receiver.discard)
                except OSError as error:
                    self._complain(error)

    def _complain(self, error: OSError) -> None:
        log.warning("output of %s cannot be kept: %s", self._rollout_id, error.strerror)
        if error.errno in OF_THE_DISK:
            self.failure = cannot_be_kept(error)


def cannot_be_kept(error: OSError) -> LaunchError:
    """Without its files, a scorer would take the rollout for one that wrote none."""
    why = error.strerror
    return LaunchError(f"the files that the rollout left cannot be kept: {why}; see to the disk they go to")


async def _blocking(function: Callable[[], T]) -> T:
    """Runs `function` in a thread. A cancel waits for its end."""
    return await uninterrupted(asyncio.to_thread(function))


class OutputReceiver:
    """Takes one rollout's stream in pieces. Blocks: not for the event loop.

    `finish` renames the draft to the rollout's folder, with all complete files, also after a stream that broke
    off. A folder that an earlier process left is replaced.
    """

    def __init__(self, rule: OutputRule, rollout_id: str) -> None:
        self._rule = rule
        self._folder = rule.folder / rollout_id
        self._draft = rule.folder / f".{rollout_id}.part"
        self._received = bytearray()
        self._files: list[OutputFile] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._left_out: int | None = None
        self._reading = self._read()

    def feed(self, content: bytes) -> None:
        """Takes the next piece. Raises ProtocolError for an invalid stream, OSError for a failure of the disk."""
        self._received += content
        next(self._reading)

    def finish(self) -> Output:
        """The files received. Raises OSError."""
        if self._file is not None:  # the stream broke off in the middle of it
            self._file.close()
            self._file = None
            broken = self._files.pop()
            (self._draft / broken.path).unlink()
        if self._files:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._draft.rename(self._folder)
        else:
            shutil.rmtree(self._draft, ignore_errors=True)
        return Output(tuple(self._files), self._left_out or 0, complete=self._left_out is not None)

    def discard(self) -> None:
        """Removes all files received."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def _read(self) -> Iterator[None]:
        """Reads the stream, and yields whenever more of it has to come first."""
        while True:
            kind = yield from self._take(1)
            if self._left_out is not None:
                raise ProtocolError("output goes on behind its end")
            if kind == b"E":
                self._left_out = int.from_bytes((yield from self._take(4)), "big")
                continue
            if kind != b"F":
                raise ProtocolError("the output is not a stream of files")
            length = int.from_bytes((yield from self._take(2)), "big")
            if not 0 < length <= MAX_PATH_BYTES:
                raise ProtocolError(f"an output file with a path of {length} bytes")
            path = yield from self._take(length)
            size = int.from_bytes((yield from self._take(8)), "big")
            self._file = file = self._opened(path, size)
            while size:
                while not self._received:
                    yield
                content = self._received[:size]
                del self._received[: len(content)]
                file.write(content)
                size -= len(content)
            file.close()
            self._file = None

    def _take(self, count: int) -> Generator[None, None, bytes]:
        """The next `count` bytes."""
        while len(self._received) < count:
            yield
        content = bytes(self._received[:count])
        del self._received[:count]
        return content

    def _opened(self, path: bytes, size: int) -> BinaryIO:
        """A new file of the draft. Raises ProtocolError, OSError."""
        if len(self._files) >= self._rule.max_files:
            raise ProtocolError(f"more than {self._rule.max_files} output files")
        self._bytes += size
        if self._bytes > self._rule.max_bytes:
            raise ProtocolError(f"more than {self._rule.max_bytes} bytes of output")
        relative = "/".join(_components(path, len(self._files) + 1))
        if not self._files:
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir(parents=True)
        place = self._draft / relative
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise ProtocolError("two output files of one path") from None
        self._files.append(OutputFile(relative, size))
        return os.fdopen(descriptor, "wb")


def _components(path: bytes, number: int) -> Iterator[str]:
    """The names in the path; one that is not printable text gets a neutral name. Raises ProtocolError."""
    parts = path.split(b"/")
    if len(parts) > MAX_DEPTH or any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
        raise ProtocolError("an output file that leaves its folder")
    for depth, part in enumerate(parts):
        name = part.decode("utf-8", "replace")
        plain = name.encode() == part and name.isprintable() and len(part) <= MAX_NAME_BYTES
        yield name if plain else f"unnamed-{number}-{depth}"
