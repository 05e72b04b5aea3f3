"""The bodies that went through the border, each kept once per run, by its hash, in `egress/` of the run directory.

They are written beside and renamed when they are whole, so that a name is always the hash of what it names. Over
the bounds a body is hashed and not kept. Files are read and written in threads.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from orchestrator.border.streams import PIECE_BYTES

NOTHING = sha256(b"").hexdigest()
MAX_BODY_BYTES = 1 << 30
_WAITING_BYTES = 1 << 20  # of one body, until they are written together
_HASHED_BYTES = 64 << 10  # in the event loop's own time
_PART = "part-"
_HASH = re.compile(r"[0-9a-f]{64}")


class Bodies:
    """Of one run. `folder`: None: nothing is kept. `most`: bytes that it may hold; 0: it is read alone."""

    def __init__(self, folder: Path | None, most: int = 0) -> None:
        """Blocks. Raises OSError."""
        self._folder, self._left = folder, most
        self._known, self._lock = set[str](), Lock()
        self.left_out = 0
        """Bodies that were hashed alone."""
        if folder is not None and most:
            folder.mkdir(exist_ok=True)
        for file in folder.iterdir() if folder is not None and folder.is_dir() else ():
            if _HASH.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                self._known.add(file.name)
                self._left -= file.stat().st_size
            elif most and file.name.startswith(_PART):
                file.unlink()  # of a run that was killed

    def body(self) -> "Body":
        """A new one."""
        return Body(self)

    def holds(self, digest: str | None) -> bool:
        """Whether this one is kept."""
        return digest == NOTHING or digest in self._known

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """A body that is kept. Raises OSError."""
        if digest == NOTHING:
            return
        assert self._folder is not None
        file = await asyncio.to_thread((self._folder / digest).open, "rb")
        try:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    def take(self, size: int) -> bool:
        """Whether there is room for so much more, which is then taken."""
        if self._folder is None or size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """What was taken and is not needed."""
        self._left += size

    def open_part(self) -> BinaryIO:
        """Blocks. Raises OSError."""
        return tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PART, delete=False)  # type: ignore[return-value]

    def keep(self, part: BinaryIO, digest: str) -> None:
        """Blocks. Raises OSError."""
        assert self._folder is not None
        part.close()
        with self._lock:
            if digest in self._known:  # an equal one was quicker, and has taken the room
                raise FileExistsError(digest)
            os.replace(part.name, self._folder / digest)
            self._known.add(digest)


class Body:
    """One body while it passes. It ends with `whole`, or with `drop`. What comes is hashed and written in a
    thread, much of it at a time, while more of it passes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._hash = sha256()
        self._waiting: list[bytes] = []
        self._part: BinaryIO | None = None
        self._putting: asyncio.Future[None] | None = None  # at most one, and nothing else touches the part then
        self.size = self._waits = self._taken = 0
        self._keeps = True

    async def add(self, piece: bytes) -> None:
        """The next piece."""
        self._waiting.append(piece)
        self._waits += len(piece)
        self.size += len(piece)
        if self._waits >= _WAITING_BYTES:
            await self._settle()
            self._begin(self._put, self._next())

    async def whole(self, wanted: str | None = None) -> tuple[str, bool]:
        """(its hash, whether it is kept). `wanted`: the only hash under which it is."""
        await self._settle()
        for piece in (pieces := self._next()):
            self._hash.update(piece)
        digest = self._hash.hexdigest()
        if self._keeps and wanted in (None, digest) and not self._bodies.holds(digest):
            self._begin(self._keep, pieces, digest)
            await self._settle()
        await self.drop()
        kept = self._bodies.holds(digest)
        self._bodies.left_out += not kept
        return digest, kept

    def known(self) -> str | None:
        """The hash of the whole body, if one like it is kept: then nothing is left to do. None: see `whole`."""
        if self._putting is not None or self._part is not None or self._waits > _HASHED_BYTES:
            return None
        hashed = self._hash.copy()
        for piece in self._waiting:
            hashed.update(piece)
        return digest if self._bodies.holds(digest := hashed.hexdigest()) else None

    async def drop(self) -> None:
        """It broke off. Idempotent, also behind `whole`."""
        self._keeps, self._waiting = False, []
        await self._settle()

    def _next(self) -> list[bytes]:
        """What waits. From here on it takes room, if it is kept."""
        pieces, size = self._waiting, self._waits
        self._waiting, self._waits = [], 0
        self._keeps = self._keeps and self.size <= MAX_BODY_BYTES and self._bodies.take(size)
        self._taken += size if self._keeps else 0
        return pieces

    def _begin(self, work: Callable[..., None], *words: object) -> None:
        self._putting = asyncio.ensure_future(asyncio.to_thread(work, *words))

    async def _settle(self) -> None:
        """The thread has done what it was given. What is not to be kept is gone."""
        if self._putting is not None:
            await asyncio.wait([self._putting])
            try:
                self._putting.result()
            except OSError:  # a full disk takes nothing from the rollout
                self._keeps = False
            self._putting = None
        if self._keeps:
            return
        self._bodies.give_back(self._taken)
        self._taken = 0
        if (part := self._part) is not None:
            self._part = None
            await asyncio.to_thread(_remove, part)

    # ------------------------------------------------------------ in the thread

    def _put(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._hash.update(piece)
        if self._keeps:
            self._write(pieces)

    def _keep(self, pieces: list[bytes], digest: str) -> None:
        self._bodies.keep(self._write(pieces), digest)
        self._part, self._taken = None, 0

    def _write(self, pieces: list[bytes]) -> BinaryIO:
        if self._part is None:
            self._part = self._bodies.open_part()
        self._part.writelines(pieces)
        return self._part


def _remove(part: BinaryIO) -> None:
    with suppress(OSError):  # closing writes what it holds, for which a full disk has no room
        part.close()
    with suppress(OSError):
        os.unlink(part.name)
