"""Files for nodes: named by their content, sent in pieces, kept on each node as long as they are used."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrator.cluster.order import Parcel
from orchestrator.errors import LaunchError
from orchestrator.tasks.attachments import open_attachment
from orchestrator.types import Attachment

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
    try:
        with path.open("wb" if begins else "ab") as file:
            file.write(piece)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise LaunchError(f"no room in {path.parent} for what the run sends: {error.strerror}") from error


class Shelf:
    """A folder of files, each under its digest. Those that no rollout uses go, the longest unused first, when they
    are more than KEPT_BYTES together. Blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}  # the longest unused first
        self._users: dict[str, int] = {}
        self._growing: dict[str, hashlib._Hash] = {}

    def missing(self, parcels: tuple[Parcel, ...]) -> tuple[str, ...]:
        """Digests of those that are not here."""
        return tuple(dict.fromkeys(p.digest for p in parcels if p.digest not in self._sizes))

    def add(self, digest: str, piece: bytes, *, begins: bool, ends: bool) -> None:
        """Takes the next piece of a file. Raises LaunchError where it cannot be kept, or is not what was named."""
        draft = self._folder / f"{digest}.part"
        grow(draft, piece, begins=begins)
        if begins:
            self._growing[digest] = hashlib.sha256()
        self._growing[digest].update(piece)
        if not ends:
            return
        if self._growing.pop(digest).hexdigest() != digest:
            draft.unlink()
            raise LaunchError("a file of the task changed on its way to the node")
        self._sizes[digest] = draft.stat().st_size
        draft.rename(self._folder / digest)

    @contextmanager
    def used(
        self, attachments: tuple[Attachment, ...], parcels: tuple[Parcel, ...]
    ) -> Iterator[tuple[Attachment, ...]]:
        """The attachments as they lie here. Within the block they stay."""
        for parcel in parcels:
            self._users[parcel.digest] = self._users.get(parcel.digest, 0) + 1
            self._sizes[parcel.digest] = self._sizes.pop(parcel.digest)
        try:
            yield tuple(
                Attachment(attachment.name, Path(os.path.realpath(self._folder), parcel.digest), parcel.size_bytes)
                for attachment, parcel in zip(attachments, parcels, strict=True)
            )
        finally:
            for parcel in parcels:
                self._users[parcel.digest] -= 1
            self._sweep()

    def _sweep(self) -> None:
        unused = [digest for digest in self._sizes if not self._users.get(digest)]
        left = sum(self._sizes[digest] for digest in unused)
        for digest in unused:
            if left <= KEPT_BYTES:
                return
            left -= self._sizes.pop(digest)
            self._users.pop(digest, None)
            (self._folder / digest).unlink(missing_ok=True)


class Desk:
    """The run's side: which parcels attachments are. Each file is read once for its digest."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int], Parcel] = {}

    def parcels(self, attachments: tuple[Attachment, ...]) -> tuple[Parcel, ...]:
        """In the order of the attachments. Blocks. Raises OSError."""
        found = []
        for attachment in attachments:
            key = (attachment.path, attachment.size_bytes, attachment.path.stat().st_mtime_ns)
            if key not in self._known:
                self._known[key] = parcel_of(attachment)
            found.append(self._known[key])
        return tuple(found)


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

    def finish(self) -> None:
        """Gives the files their place. Raises OSError."""
        if self._draft.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._draft.rename(self._folder)

    def discard(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)
