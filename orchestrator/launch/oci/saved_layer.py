"""Copies what a sandbox wrote to its root into a folder that stays, and that is a layer of other sandboxes.

Whatever ran in the sandbox filled the source: each step opens one name in one folder and follows nothing; sizes
are bounded. Owners are as they were inside, where this user may set them; set-id bits, devices, pipes and sockets
are left out, and so is what an ordinary user may not read.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from orchestrator.launch.base import SavedLayer, TooMuch
from orchestrator.launch.difference import below, is_opaque, is_whiteout
from orchestrator.launch.uids import RANGE_IDS

MAX_BYTES, MAX_FILES = 2 << 30, 200_000
_DEPTH = 64
_PIECE_BYTES = 1 << 20
_ITS_DOING = (errno.ENAMETOOLONG, errno.EMLINK)  # whatever this machine is
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LayerRules(NamedTuple):
    """`dropped`, `merged`: as of `CommandSandbox.save_layer`. `mark`: the attribute of folders that hide what lies
    below. `first_id`: the id, outside, of the root inside; None: this user may set no owners."""

    dropped: re.Pattern[str]
    merged: re.Pattern[str]
    mark: str
    first_id: int | None


def save_layer(upper: int, folder: Path, lowers: Sequence[int], rules: LayerRules) -> SavedLayer:
    """`upper`, `lowers`: descriptors of the folder that took what was written, and of those below it, top first.
    Raises OSError, TooMuch."""
    saving = _Saving(rules)
    try:
        saving.fill(upper, folder, "/", lowers, _DEPTH)
    except OSError as error:
        if error.errno in _ITS_DOING:
            raise TooMuch(f"its names are too long, or too many for one file: {error.strerror}") from error
        raise
    folder.chmod(0o755)
    return SavedLayer(saving.digest.hexdigest(), saving.size_bytes)


class _Saving:
    def __init__(self, rules: LayerRules) -> None:
        self._rules = rules
        self._files = 0
        self._names = dict[tuple[int, int], Path]()  # of files with several, by device and number
        self.size_bytes = 0
        self.digest = hashlib.sha256()

    def fill(self, at: int, target: Path, path: str, lowers: Sequence[int], depth: int) -> None:
        with os.scandir(at) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            self._copy(at, name, target / name, path + name, lowers, depth)

    def _copy(self, at: int, name: str, target: Path, path: str, lowers: Sequence[int], depth: int) -> None:
        status = os.stat(name, dir_fd=at, follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if self._rules.dropped.match(f"{path}/" if is_folder else path):
            return
        self._files += 1
        if self._files > MAX_FILES or depth == 0:
            raise TooMuch(f"it has more than {MAX_FILES} files, or is more than {_DEPTH} folders deep")
        if is_folder:
            with _opened(at, name, _FOLDER) as inner:
                if inner is not None:
                    self._copy_folder(inner, name, target, f"{path}/", lowers, depth)
        elif stat.S_ISREG(status.st_mode):
            with _opened(at, name, _FILE) as inner:
                if inner is not None:
                    self._copy_file(inner, status, target, path)
        elif stat.S_ISLNK(status.st_mode):
            link = os.readlink(name, dir_fd=at)
            target.symlink_to(link)
            self._own(target, status)
            self._feed(path, status, os.fsencode(link))
        elif is_whiteout(status):
            os.mknod(target, stat.S_IFCHR)
            self._feed(path, status)

    def _copy_folder(self, at: int, name: str, target: Path, path: str, lowers: Sequence[int], depth: int) -> None:
        was_made_anew = is_opaque(at, self._rules.mark)
        under = [] if was_made_anew else below(lowers, name, self._rules.mark)
        try:
            target.mkdir(mode=0o700)
            self.fill(at, target, path, under, depth - 1)
        finally:
            for lower in under:
                os.close(lower)
        is_empty = next(target.iterdir(), None) is None
        if is_empty and under:  # the same as below, but perhaps for what is not kept
            target.rmdir()
            return
        status = os.fstat(at)
        hides = was_made_anew or not (under or is_empty or self._rules.merged.match(path))
        if hides:
            os.setxattr(target, self._rules.mark, b"y")
        self._feed(path, status, b"hides" if hides else b"")
        self._own(target, status)
        target.chmod(stat.S_IMODE(status.st_mode) & 0o1777)

    def _copy_file(self, at: int, status: os.stat_result, target: Path, path: str) -> None:
        first = self._names.get((status.st_dev, status.st_ino))
        self._feed(path, status, b"" if first is None else os.fsencode(first.name))
        if first is not None:
            os.link(first, target)
            return
        with target.open("xb") as file:
            while piece := os.read(at, _PIECE_BYTES):
                self.size_bytes += len(piece)
                if self.size_bytes > MAX_BYTES:
                    raise TooMuch(f"it has more than {MAX_BYTES >> 30} GiB")
                self.digest.update(piece)
                file.write(piece)
        self._own(target, status)
        target.chmod(stat.S_IMODE(status.st_mode) & 0o1777)
        os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))  # Python's bytecode names it
        if status.st_nlink > 1:
            self._names[status.st_dev, status.st_ino] = target

    def _own(self, target: Path, status: os.stat_result) -> None:
        if self._rules.first_id is not None:
            os.chown(target, self._inside(status.st_uid), self._inside(status.st_gid), follow_symlinks=False)

    def _inside(self, number: int) -> int:
        inside = number - (self._rules.first_id or 0)
        return inside if 0 <= inside < RANGE_IDS else 0

    def _feed(self, path: str, status: os.stat_result, more: bytes = b"") -> None:
        owner = (self._inside(status.st_uid), self._inside(status.st_gid)) if self._rules.first_id else (0, 0)
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        self.digest.update(b"%b\0%o\0%d\0%d\0%d\0%b\0" % (os.fsencode(path), status.st_mode, *owner, size, more))


@contextmanager
def _opened(at: int, name: str, flags: int) -> Iterator[int | None]:
    """None: this user may not read it."""
    try:
        opened = os.open(name, flags, dir_fd=at)
    except PermissionError:
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)
