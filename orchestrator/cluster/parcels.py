"""Files for nodes: named by their content, sent in pieces, kept on each node as long as they are used."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from orchestrator.cluster.order import Parcel
from orchestrator.errors import LaunchError
from orchestrator.tasks.attachments import open_attachment
from orchestrator.types import Attachment, OutputFile

PIECE_BYTES = 8 << 20  # what is in memory of one file at a time, on either side
KEPT_BYTES = 2 << 30  # of files that no rollout uses now, on a node's disk


def parcel_of(attachment: Attachment) -> Parcel:
    """Reads the file once. Blocks. Raises OSError."""
    digest = hashlib.sha256()
    with open_attachment(attachment) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return Parcel(digest.hexdigest(), attachment.size_bytes)


def grow(path: Path, piece: bytes, *, begins: bool) -> None:
    """Adds a piece to a file that comes from the run. Blocks. Raises LaunchError; the file is gone then."""
    with _room(path), path.open("wb" if begins else "ab") as file:
        file.write(piece)


@contextmanager
def _room(path: Path) -> Iterator[None]:
    """A failure of the disk in this block is a LaunchError, and the file is gone."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise LaunchError(f"no room in {path.parent} for what the run sends: {error.strerror}") from error


class Shelf:
    """A folder of files, each under its digest. Those that no rollout uses go, the longest unused first, when they
    are more than KEPT_BYTES together. Blocks. Files may be added in one thread and used in another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._users: dict[str, int] = {}  # of every file on the shelf
        self._unused: dict[str, int] = {}  # sizes, the longest unused first
        self._unused_bytes = 0
        self._lock = Lock()
        self._growing: dict[str, hashlib._Hash] = {}

    def missing(self, parcels: tuple[Parcel, ...]) -> tuple[str, ...]:
        """Digests of those that are not on the shelf."""
        return tuple(dict.fromkeys(p.digest for p in parcels if p.digest not in self._users))

    def add(self, digest: str, piece: bytes, *, begins: bool, ends: bool) -> None:
        """Takes the next piece of a file. Raises LaunchError where it cannot be kept, or is not what was named."""
        draft = self._folder / f"{digest}.part"
        if begins:
            self._growing[digest] = hashlib.sha256()
        grow(draft, piece, begins=begins)
        self._growing[digest].update(piece)
        if not ends:
            return
        with _room(draft):
            if self._growing.pop(digest).hexdigest() != digest:
                draft.unlink()
                raise LaunchError("a file of the task changed on its way to the node")
            size = draft.stat().st_size
            draft.rename(self._folder / digest)
        with self._lock:
            self._users[digest] = 0
            self._put_by(digest, size)

    @contextmanager
    def used(
        self, attachments: tuple[Attachment, ...], parcels: tuple[Parcel, ...]
    ) -> Iterator[tuple[Attachment, ...]]:
        """The attachments, as files of the shelf, which stay within the block."""
        with self._lock:
            for parcel in parcels:
                self._users[parcel.digest] += 1
                self._unused_bytes -= self._unused.pop(parcel.digest, 0)
        try:
            yield tuple(
                Attachment(attachment.name, Path(os.path.realpath(self._folder), parcel.digest), parcel.size_bytes)
                for attachment, parcel in zip(attachments, parcels, strict=True)
            )
        finally:
            with self._lock:
                for parcel in parcels:
                    self._users[parcel.digest] -= 1
                    if not self._users[parcel.digest]:
                        self._put_by(parcel.digest, parcel.size_bytes)
                self._sweep()

    def _put_by(self, digest: str, size: int) -> None:
        self._unused[digest] = size
        self._unused_bytes += size

    def _sweep(self) -> None:
        while self._unused_bytes > KEPT_BYTES:
            digest = next(iter(self._unused))
            self._unused_bytes -= self._unused.pop(digest)
            del self._users[digest]
            with suppress(OSError):  # on a disk that fails it stays, until the run ends
                (self._folder / digest).unlink()


class Desk:
    """The run's side: which parcels attachments are. Each file is read once for its digest."""

    def __init__(self) -> None:
        self._parcels: dict[tuple[Path, int, int], Parcel] = {}

    def parcels(self, attachments: tuple[Attachment, ...]) -> tuple[Parcel, ...]:
        """In the order of the attachments. Blocks. Raises OSError."""
        parcels = []
        for attachment in attachments:
            key = (attachment.path, attachment.size_bytes, attachment.path.stat().st_mtime_ns)
            if key not in self._parcels:
                self._parcels[key] = parcel_of(attachment)
            parcels.append(self._parcels[key])
        return tuple(parcels)


def pieces(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bool, bool]]:
    """(piece, whether it is the first, whether it is the last) of a file of that size. Blocks."""
    at = 0
    while True:
        piece = file.read(PIECE_BYTES)
        yield piece, at == 0, at + len(piece) >= size or not piece
        at += len(piece)
        if at >= size or not piece:
            return


class KeptOutput:
    """Writes the files that a rollout left on its node into the run's folder: all of them, or none. Blocks."""

    def __init__(self, folder: Path, rollout_id: str) -> None:
        self._folder = folder / rollout_id
        self._draft = folder / f".{rollout_id}.part"
        shutil.rmtree(self._draft, ignore_errors=True)

    def append(self, path: str, piece: bytes) -> None:
        """Raises OSError; ValueError for a path that leaves the folder."""
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"an output file that leaves its folder: {path!r}")
        place = self._draft / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab") as file:
            file.write(piece)

    def finish(self, files: tuple[OutputFile, ...]) -> None:
        """Gives the files their place. Raises OSError; ValueError where one of them did not come whole."""
        for file in files:
            if (size := (self._draft / file.path).stat().st_size) != file.size_bytes:
                raise ValueError(f"{size} bytes came of {file.path!r}, not {file.size_bytes}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._draft.rename(self._folder)

    def discard(self) -> None:
        """Removes what was not finished."""
        shutil.rmtree(self._draft, ignore_errors=True)
