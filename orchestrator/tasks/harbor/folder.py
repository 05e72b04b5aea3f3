"""The files of a task's folder, found and read without following a link.

A folder comes from somebody else: each of its files may be a link, a pipe, or larger than memory.
"""

import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.rules.text import printable
from orchestrator.tasks.base import BadRow
from orchestrator.tasks.pointers import pointer_of
from orchestrator.types import TaskFile

MAX_FILES, MAX_BYTES, MAX_DEPTH = 20_000, 1 << 30, 64  # of tests, or of a solution
MAX_STEP_FILES = 1_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening must not block at a pipe.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_REASONS = {
    errno.ELOOP: "is a link, and links are not followed",
    errno.ENOTDIR: "is no folder, or a link to one",  # O_DIRECTORY is checked before O_NOFOLLOW
}


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """An open folder. What its methods get as `name` is ours, like `tests/test.sh`."""

    path: Path
    descriptor: int

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator["TaskFolder"]:
        """Within this block. The path may have links up to its last part. Raises BadRow."""
        with _reading("the task's folder"):
            opened = os.open(path, _FOLDER)
        with _descriptor(opened) as descriptor:
            yield cls(path, descriptor)

    def text(self, name: str, max_bytes: int) -> str | None:
        """The UTF-8 text of a file; None: there is none. Raises BadRow."""
        with _reading(name), self._place(name) as (place, own_name):
            if place is None:
                return None
            try:
                opened = os.open(own_name, _FILE, dir_fd=place)
            except FileNotFoundError:
                return None
            with _descriptor(opened):
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    raise BadRow(f"{name} is no regular file")
                content = _content(opened, max_bytes)
        if (pointer := pointer_of(content, len(content))) is not None:
            raise BadRow(f"{name} is {pointer}")
        if len(content) > max_bytes:
            raise BadRow(f"{name} has more than {max_bytes} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRow(f"{name} is no UTF-8") from None

    def has(self, name: str) -> bool:
        """Whether there is anything but a folder of this name."""
        mode = self._mode(name)
        return bool(mode) and not stat.S_ISDIR(mode)

    def has_folder(self, name: str) -> bool:
        """Whether there is anything that could be a folder: what it is, `demand_plain` says."""
        return bool(self._mode(name))

    def _mode(self, name: str) -> int:
        """0: there is nothing of this name."""
        with _reading(name), self._place(name) as (place, own_name):
            try:
                status = None if place is None else os.stat(own_name, dir_fd=place, follow_symlinks=False)
            except FileNotFoundError:
                return 0
        return 0 if status is None else status.st_mode

    def demand_plain(self, name: str) -> None:
        """Raises BadRow unless all in the folder `name` are files, folders, and links that stay in it, within
        bounds. There may be no such folder."""
        files = size = 0
        with _reading(name), self._place(f"{name}/.") as (top, _):
            for way, folders, names, place in () if top is None else os.fwalk(".", onerror=_refuse, dir_fd=top):
                if way.count("/") >= MAX_DEPTH:
                    raise BadRow(f"{name} is more than {MAX_DEPTH} folders deep")
                for own_name in (*folders, *names):
                    status = os.stat(own_name, dir_fd=place, follow_symlinks=False)
                    files, size = files + 1, size + status.st_size
                    if files > MAX_FILES or size > MAX_BYTES:
                        raise BadRow(f"{name} has more than {MAX_FILES} files, or {MAX_BYTES >> 20} MiB")
                    if stat.S_ISLNK(status.st_mode):
                        target = posixpath.join(way, os.readlink(own_name, dir_fd=place))
                        if target.startswith("/") or posixpath.normpath(target).split("/")[0] == "..":
                            raise BadRow(f"{name} has a link that leads out of it: {_shown(own_name)}")
                    elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                        raise BadRow(f"{name} has no file, folder or link called {_shown(own_name)}")

    def files(self, name: str, max_bytes: int) -> tuple[TaskFile, ...]:
        """All files in the folder `name`, in order, empty folders left out. There may be no such folder. Raises
        BadRow, for links too."""
        found: list[TaskFile] = []
        left = max_bytes
        with _reading(name), self._place(f"{name}/.") as (top, _):
            for way, folders, names, place in () if top is None else os.fwalk(".", onerror=_refuse, dir_fd=top):
                folders.sort()
                links = [
                    one
                    for one in folders
                    if stat.S_ISLNK(os.stat(one, dir_fd=place, follow_symlinks=False).st_mode)
                ]
                if links or way.count("/") >= MAX_DEPTH or len(found) + len(names) > MAX_STEP_FILES:
                    why = (
                        f"is more than {MAX_DEPTH} folders deep, or has a link or more than {MAX_STEP_FILES} files"
                    )
                    raise BadRow(f"{name} {why}")
                for own_name in sorted(names):
                    with _descriptor(os.open(own_name, _FILE, dir_fd=place)) as opened:
                        status = os.fstat(opened)
                        content = _content(opened, left) if stat.S_ISREG(status.st_mode) else None
                    path = posixpath.normpath(posixpath.join(way, own_name))
                    if content is None or not path.isprintable():
                        raise BadRow(
                            f"{name}: {_shown(path)} is no regular file, or has no name that can be printed"
                        )
                    if (left := left - len(content)) < 0:
                        raise BadRow(f"{name} has more than {max_bytes >> 20} MiB")
                    found.append(TaskFile(path, content, bool(status.st_mode & 0o100)))
        return tuple(found)

    @contextmanager
    def _place(self, name: str) -> Iterator[tuple[int | None, str]]:
        """The folder in which `name` lies, and its own name there; None: there is no such folder."""
        *way, own_name = name.split("/")
        with ExitStack() as stack:
            place: int | None = self.descriptor
            for depth, folder in enumerate(way, 1):
                with _reading("/".join(way[:depth])):
                    try:
                        opened = os.open(folder, _FOLDER, dir_fd=place)
                    except FileNotFoundError:
                        place = None
                        break
                place = stack.enter_context(_descriptor(opened))
            yield place, own_name


@contextmanager
def _descriptor(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a NUL in a path
        code = error.errno if isinstance(error, OSError) else None
        raise BadRow(f"{name}: {_REASONS.get(code or 0) or getattr(error, 'strerror', None) or error}") from error


def _content(opened: int, max_bytes: int) -> bytes:
    """One byte more than allowed, of a file that is too large."""
    with open(opened, "rb", closefd=False) as file:
        return file.read(max_bytes + 1)


def _refuse(error: OSError) -> None:
    raise error


def _shown(name: str) -> str:
    return printable(name, "?")[:100]
