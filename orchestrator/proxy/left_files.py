"""The files a rollout left, from the sandbox's stream to a folder: everything in it is checked here.

The stream's form is sandbox/pid1/outbox.py's. A path becomes a file only if it stays below the folder; links
and devices cannot be said in it at all. Bytes go to disk as they come, nothing waits in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from orchestrator.errors import ProtocolError
from orchestrator.types import Output, OutputFile
from orchestrator.waits import uninterrupted

MAX_DEPTH = 8
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_PIECES = 64  # and one more for each PIECE_BYTES of what may come
PIECE_BYTES = 128 * 1024

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputRule:
    """Where files go and how many. `folder`: one folder below it per rollout."""

    folder: Path
    max_files: int
    max_bytes: int


class OutputIntake:
    """Takes the stream of files once, until `finish`. `rule` None: none is asked for."""

    def __init__(self, rule: OutputRule | None, rollout_id: str) -> None:
        self.rule = rule
        self._rollout_id = rollout_id
        self._receiver: OutputReceiver | None = None
        self._over = False
        self._sent = asyncio.Event()
        self._lock = asyncio.Lock()  # the files must not be touched any more once it is let go of

    async def take(self, pieces: AsyncIterator[bytes]) -> None:
        """Raises ProtocolError."""
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
        """Waits until the stream is at its end, or broke off."""
        await self._sent.wait()

    async def finish(self) -> Output | None:
        """What came of the files; None: nothing. Nothing is taken any more. Idempotent."""
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
        """What came is removed, unless it was finished. Nothing is taken any more. Idempotent."""
        async with self._lock:
            over, self._over = self._over, True
            if not over and self._receiver is not None:
                try:
                    await _blocking(self._receiver.discard)
                except OSError as error:
                    self._complain(error)

    def _complain(self, error: OSError) -> None:
        log.warning("output of %s cannot be kept: %s", self._rollout_id, error.strerror)


async def _blocking(function: Callable[[], T]) -> T:
    """In a thread, to its end."""
    return await uninterrupted(asyncio.to_thread(function))


class OutputReceiver:
    """Takes one rollout's stream in pieces. Blocks: not for the event loop.

    The folder appears whole under its name when the stream is at its end, or with what had come when it broke
    off; one that an earlier process left is replaced.
    """

    def __init__(self, rule: OutputRule, rollout_id: str) -> None:
        self._rule = rule
        self._folder = rule.folder / rollout_id
        self._draft = rule.folder / f".{rollout_id}.part"
        self._received = bytearray()
        self._files: list[OutputFile] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._left = 0
        self._left_out: int | None = None

    def feed(self, content: bytes) -> None:
        """The next piece. Raises ProtocolError for what no runner of ours sends, OSError of the disk."""
        self._received += content
        while self._step():
            pass

    def finish(self) -> Output:
        """What came. Idempotent in what is on disk. Raises OSError."""
        if self._file is not None:  # broken off in the middle of it
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
        """Nothing of it stays."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def _step(self) -> bool:
        """Whether it got on."""
        if self._file is not None:
            content = self._received[: self._left]
            del self._received[: len(content)]
            self._file.write(content)
            self._left -= len(content)
            if self._left == 0:
                self._file.close()
                self._file = None
                return True
            return False
        if not self._received:
            return False
        if self._left_out is not None:
            raise ProtocolError("output goes on behind its end")
        kind = self._received[:1]
        if kind == b"E":
            if len(self._received) < 5:
                return False
            self._left_out = int.from_bytes(self._received[1:5], "big")
            del self._received[:5]
            return True
        if kind != b"F":
            raise ProtocolError("output that is no stream of files")
        return self._begin_file()

    def _begin_file(self) -> bool:
        if len(self._received) < 3:
            return False
        length = int.from_bytes(self._received[1:3], "big")
        if not 0 < length <= MAX_PATH_BYTES:
            raise ProtocolError(f"an output file with a path of {length} bytes")
        if len(self._received) < 11 + length:
            return False
        path = bytes(self._received[3 : 3 + length])
        size = int.from_bytes(self._received[3 + length : 11 + length], "big")
        del self._received[: 11 + length]
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
        self._file, self._left = os.fdopen(descriptor, "wb"), size
        self._files.append(OutputFile(relative, size))
        return True


def _components(path: bytes, number: int) -> Iterator[str]:
    """The path's names; one that is no plain text gets a neutral name. Raises ProtocolError."""
    parts = path.split(b"/")
    if len(parts) > MAX_DEPTH or any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
        raise ProtocolError("an output file that leaves its folder")
    for depth, part in enumerate(parts):
        name = part.decode("utf-8", "replace")
        plain = name.encode() == part and name.isprintable() and len(part) <= MAX_NAME_BYTES
        yield name if plain else f"unnamed-{number}-{depth}"
