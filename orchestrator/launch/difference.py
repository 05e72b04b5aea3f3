"""The difference between an overlay and what lies below it, read from its upper folder. Untrusted: model-written
code filled it, as root.

Every step opens one name in one folder and follows nothing. What costs time or room is bounded: how many names are
looked at, how deep, the bytes of files and of diffs. Nothing else may write into the folder meanwhile.

The folder itself, not a copy, can be a lower layer of another sandbox: mounted without devices and set-id bits, by
the same kind of user. The formats: the kernel's `filesystems/overlayfs.rst`; `layer.md` of the OCI image
specification.
"""

import os
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Final, NamedTuple

from orchestrator.launch.text_diff import TextDiffs
from orchestrator.types import Change, ChangeKind, Difference, LeftOut

OPAQUE: Final = "trusted.overlay.opaque"
OPAQUE_OF_USERS: Final = "user.overlay.opaque"  # of an overlay that an ordinary user mounted, with `userxattr`
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MARKER = ".wh."  # begins the names by which tar files of layers hide what lies below
_ODD = re.compile(f"^{re.escape(_MARKER)}|[\0-\x1f\x7f-\x9f\ud800-\udfff]")  # lone surrogates: no UTF-8
_OPAQUE_MARKER = ".wh..wh..opq"
_NAME_BYTES = 4096  # Linux' limit of a path
_SHORT_CHARS = _NAME_BYTES // 4
_DIFF_BYTES = 64 << 10  # of a file that is compared
_SPECIAL: dict[int, LeftOut] = {
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """`entries`: names that are looked at. `size_bytes`: of all files together. `depth`: of folders, each of which
    holds a descriptor. `changes`, `path_chars`: that are listed. `diff_bytes`: of all diffs; 0: none are made."""

    entries: int = 200_000
    size_bytes: int = 4 << 30
    depth: int = 64
    changes: int = 500
    path_chars: int = 64 << 10
    diff_bytes: int = 256 << 10


class _Entry(NamedTuple):
    """`at`: descriptor of its folder. `before`: the folder that holds what was there before, and its status."""

    at: int
    name: str
    path: str
    kind: ChangeKind
    status: os.stat_result
    before: tuple[int, os.stat_result] | None
    target: str = ""  # of a link


class _Folder:
    """A folder of the upper one, with those of the same path below it, the topmost first."""

    def __init__(self, at: int, path: str, lowers: Sequence[int]) -> None:
        self.at, self.path, self.lowers = at, path, lowers
        self.names: Iterator[str] = iter(())

    def read(self, most: int) -> None:
        """Its names, in order, but no more than so many."""
        with os.scandir(self.at) as entries:
            self.names = iter(sorted(entry.name for entry in islice(entries, most)))

    def before(self, name: str) -> tuple[int, os.stat_result] | None:
        """What lay there, as far as it is known."""
        for lower in self.lowers:
            try:
                status = os.stat(name, dir_fd=lower, follow_symlinks=False)
            except FileNotFoundError:
                continue
            return None if is_whiteout(status) else (lower, status)
        return None

    def close(self) -> None:
        for descriptor in (self.at, *self.lowers):
            os.close(descriptor)


def walk(
    upper: int,
    bounds: Bounds = Bounds(),
    lowers: Sequence[int] = (),
    *,
    opaque: str = OPAQUE,
) -> Difference:
    """What the folder `upper` changes. Blocks. Raises OSError.

    `lowers`: the folders below it, the topmost first; without them everything counts as `added`. `opaque`: the
    attribute by which the overlay marks folders. All are descriptors, and stay open.
    """
    left_out, changes = Counter[LeftOut](), list[Change]()
    diffs = TextDiffs(bounds.diff_bytes)
    count = size_bytes = path_chars = 0
    for entry in _entries(upper, bounds, lowers, opaque, left_out):
        count += 1
        size = 0 if entry.kind == "removed" or stat.S_ISDIR(entry.status.st_mode) else entry.status.st_size
        size_bytes += size
        path_chars += len(entry.path)
        if len(changes) < bounds.changes and path_chars <= bounds.path_chars:
            mode = 0 if entry.kind == "removed" else entry.status.st_mode & 0o777
            changes.append(Change(entry.path, entry.kind, size, mode, _diff(entry, diffs)))
    return Difference(tuple(changes), count, size_bytes, dict(left_out))


def write_tar(
    upper: int,
    file: IO[bytes],
    bounds: Bounds = Bounds(),
    lowers: Sequence[int] = (),
    *,
    opaque: str = OPAQUE,
) -> dict[LeftOut, int]:
    """Writes the upper folder as the tar of a layer, and returns what was left out. Owners are root's, times 0.
    Arguments as of `walk`. Blocks. Raises OSError."""
    left_out = Counter[LeftOut]()
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in _entries(upper, bounds, lowers, opaque, left_out):
            info = tarfile.TarInfo(entry.path.strip("/"))
            info.mode = entry.status.st_mode & 0o777
            if entry.kind == "removed":
                folder, _, name = info.name.rpartition("/")
                is_folder = entry.path.endswith("/")  # that is made again
                info.name = f"{info.name}/{_OPAQUE_MARKER}" if is_folder else os.path.join(folder, _MARKER + name)
                tar.addfile(info)
            elif stat.S_ISDIR(entry.status.st_mode):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif stat.S_ISLNK(entry.status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
            else:
                info.size = entry.status.st_size
                try:
                    content = open(os.open(entry.name, _FILE, dir_fd=entry.at), "rb")  # noqa: SIM115
                except PermissionError:
                    left_out["unreadable"] += 1
                    continue
                with content:
                    tar.addfile(info, content)
    return dict(left_out)


def _entries(
    upper: int, bounds: Bounds, lowers: Sequence[int], opaque: str, left_out: Counter[LeftOut]
) -> Iterator[_Entry]:
    """What changed, folders before what is in them. An entry's descriptors are open until the next is taken."""
    looked_at, size_bytes = 0, 0
    folders = [_Folder(_again(upper), "/", [_again(lower) for lower in lowers])]
    try:
        folders[0].read(bounds.entries + 1)
        while folders:
            folder = folders[-1]
            name = next(folder.names, None)
            if name is None:
                folders.pop().close()
                continue
            if looked_at == bounds.entries:
                left_out["more"] += 1
                return
            looked_at += 1
            path = folder.path + name
            if _ODD.search(name) or (len(path) > _SHORT_CHARS and len(path.encode()) > _NAME_BYTES):
                left_out["name"] += 1
                continue
            status = os.stat(name, dir_fd=folder.at, follow_symlinks=False)
            mode, before = status.st_mode, folder.before(name) if folder.lowers else None
            kind: ChangeKind = "changed" if before else "added"
            if stat.S_ISREG(mode):
                if size_bytes + status.st_size > bounds.size_bytes:
                    left_out["size"] += 1
                    continue
                size_bytes += status.st_size
                if mode & (stat.S_ISUID | stat.S_ISGID):
                    left_out["set_id"] += 1
                yield _Entry(folder.at, name, path, kind, status, before)
            elif stat.S_ISDIR(mode):
                if len(folders) > bounds.depth:
                    left_out["depth"] += 1
                    continue
                try:
                    at = os.open(name, _FOLDER, dir_fd=folder.at)
                except PermissionError:
                    left_out["unreadable"] += 1
                    if before is None or before[1].st_mode != mode:
                        yield _Entry(folder.at, name, path + "/", kind, status, before)
                    continue
                is_new = is_opaque(at, opaque)
                lower = [] if is_new else below(folder.lowers, name, opaque)
                inner = _Folder(at, path + "/", lower)
                folders.append(inner)
                inner.read(bounds.entries + 1 - looked_at)
                if is_new and before:
                    yield _Entry(folder.at, name, inner.path, "removed", status, before)
                    yield _Entry(folder.at, name, inner.path, "added", status, None)
                elif before is None or before[1].st_mode != mode:
                    yield _Entry(folder.at, name, inner.path, kind, status, before)
            elif is_whiteout(status):
                yield _Entry(folder.at, name, path, "removed", status, before)
            elif stat.S_ISLNK(mode):
                target = os.readlink(name, dir_fd=folder.at)
                if leads_out(target, folder.path):
                    left_out["link"] += 1
                else:
                    yield _Entry(folder.at, name, path, kind, status, before, target)
            else:
                left_out[_SPECIAL[stat.S_IFMT(mode)]] += 1
    finally:
        for folder in folders:
            folder.close()


def _again(folder: int) -> int:
    """A descriptor with a position of its own."""
    return os.open(".", _FOLDER, dir_fd=folder)


def below(lowers: Sequence[int], name: str, opaque: str) -> list[int]:
    """The folders of this name in the lower ones, as far as they are merged. The caller closes them."""
    opened: list[int] = []
    for lower in lowers:
        try:
            opened.append(os.open(name, _FOLDER, dir_fd=lower))
        except FileNotFoundError:
            continue
        except OSError:  # something else, which hides what lies below it
            break
        if is_opaque(opened[-1], opaque):
            break
    return opened


def is_whiteout(status: os.stat_result) -> bool:
    """Whether it hides what lies below."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(folder: int | Path, name: str) -> bool:
    """Whether the folder has the attribute `name` and so hides what lies below."""
    try:
        return os.getxattr(folder, name) == b"y"
    except OSError:  # there is none
        return False


def leads_out(target: str, folder: str) -> bool:
    """Whether a link in `folder` (`/` or `/PATH/`) is absolute, leads above the root, or is no text."""
    if target.startswith("/") or _ODD.search(target):
        return True
    depth = folder.count("/") - 1
    for part in target.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return True
    return False


def _diff(entry: _Entry, diffs: TextDiffs) -> str | None:
    if entry.kind == "removed" or not diffs.left_bytes or not 0 < entry.status.st_size <= _DIFF_BYTES:
        return None
    if not stat.S_ISREG(entry.status.st_mode):
        return None
    try:
        old = b""
        if entry.before is not None:
            lower, status = entry.before
            if not stat.S_ISREG(status.st_mode) or status.st_size > _DIFF_BYTES:
                return None
            old = _content(entry.name, lower)
        new = _content(entry.name, entry.at)
    except PermissionError:  # its name and size are known all the same
        return None
    return diffs.make(old, new)


def _content(name: str, at: int) -> bytes:
    with open(os.open(name, _FILE, dir_fd=at), "rb") as file:
        return file.read(_DIFF_BYTES)
