"""The files of an image, below one folder and reached by descriptors from it: no name and no link leads out.

The names in an image are untrusted, and so are the links that earlier entries made. So no path is ever given to
the kernel whole: each step opens one folder and follows nothing. A link inside the image is followed here, step by
step.
"""

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKS = 40  # on one way, as in Linux
OPEN = 0o755  # the mode of folders that an image has without an entry of their own


class Outside(ValueError):
    """A name leads out of the tree, or through something that is no folder."""


class Tree(AbstractContextManager["Tree"]):
    """Stands in one folder of the tree at a time; names without a way are of that folder.

    `moves` counts steps from folder to folder, `new_folders` the folders that were made: what hostile names cost.
    """

    def __init__(self, root: Path) -> None:
        self.moves = self.new_folders = 0
        self._at = os.open(root, _FOLDER)
        self._names: list[str] = []  # of the folder it stands in, from the root on; none of them is a link

    def __exit__(self, *exception: object) -> None:
        os.close(self._at)

    # ------------------------------------------------------------ ways

    def enter(self, way: Sequence[str], *, make: bool = True, links: bool = True) -> str:
        """Goes to the folder `way`, which starts at the root, and returns its name without links. Raises Outside,
        also for links unless `links`; FileNotFoundError unless `make`."""
        shared = 0
        while shared < min(len(way), len(self._names)) and way[shared] == self._names[shared]:
            shared += 1
        while len(self._names) > shared:
            self._move("..")
        ahead, followed = list(reversed(way[shared:])), 0
        while ahead:
            name = ahead.pop()
            if name == ".." and not self._names:
                raise Outside("it lies outside")
            try:
                self._move(name)
            except FileNotFoundError:
                if not make:
                    raise
                self.folder(name, OPEN)
                self.new_folders += 1
                self._move(name)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                target = self._link(name)
                followed += 1
                if target is None or not links or target.startswith("/") or followed > _LINKS:
                    raise Outside(f"it lies outside, behind {name}, which is not a folder") from None
                ahead += reversed([part for part in target.split("/") if part not in ("", ".")])
        return "/".join(self._names)

    def _move(self, name: str) -> None:
        self.moves += 1
        there = os.open(name, _FOLDER, dir_fd=self._at)
        os.close(self._at)
        self._at = there
        if name == "..":
            self._names.pop()
        else:
            self._names.append(name)

    def _link(self, name: str) -> str | None:
        """Where the link leads; None: it is no link."""
        try:
            return os.readlink(name, dir_fd=self._at)
        except OSError:
            return None

    # ------------------------------------------------------------ what is in this folder

    def names(self) -> list[str]:
        return os.listdir(self._at)

    def kind(self, name: str) -> tuple[int, int]:
        """(what it is, one of stat's S_IF; its size). 0: there is nothing of this name."""
        try:
            status = os.stat(name, dir_fd=self._at, follow_symlinks=False)
        except FileNotFoundError:
            return 0, 0
        return stat.S_IFMT(status.st_mode), status.st_size

    def folder(self, name: str, mode: int, owner: tuple[int, int] | None = None) -> None:
        """Makes the folder, or gives the one that is there this mode, whatever the process' umask is."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._at)
        there = os.open(name, _FOLDER, dir_fd=self._at)
        try:
            if owner is not None:
                os.fchown(there, *owner)
            os.fchmod(there, mode)
        finally:
            os.close(there)

    def file(self, name: str, mode: int, owner: tuple[int, int] | None = None) -> int:
        """A new file, opened for writing."""
        file = os.open(name, _NEW_FILE, 0o600, dir_fd=self._at)
        try:
            if owner is not None:
                os.fchown(file, *owner)
            os.fchmod(file, mode)
        except BaseException:
            os.close(file)
            raise
        return file

    def link(self, name: str, target: str, owner: tuple[int, int] | None = None) -> None:
        os.symlink(target, name, dir_fd=self._at)
        if owner is not None:
            os.chown(name, *owner, dir_fd=self._at, follow_symlinks=False)

    def second_name(self, name: str, way: Sequence[str]) -> None:
        """Makes `name` another name of the file `way`, which starts at the root. Raises Outside."""
        way_here = list(self._names)
        self.enter(way[:-1], make=False)
        there = os.dup(self._at)
        try:
            if self.kind(way[-1])[0] != stat.S_IFREG:
                raise Outside("it is a hard link to something that is not a file")
            self.enter(way_here)
            os.link(way[-1], name, src_dir_fd=there, dst_dir_fd=self._at, follow_symlinks=False)
        finally:
            os.close(there)

    def share(self, name: str, file: Path) -> int:
        """Makes `name` a hard link to a file that lies anywhere. Returns its bytes."""
        os.link(file, name, dst_dir_fd=self._at, follow_symlinks=False)
        return file.stat().st_size

    def remove(self, name: str) -> None:
        """Whatever it is, with all that is in it."""
        remove(name, self._at)

    def change(self, mode: int | None = None, time_s: float | None = None) -> None:
        """Gives the folder it stands in a mode, or a time."""
        if mode is not None:
            os.fchmod(self._at, mode)
        if time_s is not None:
            os.utime(self._at, (time_s, time_s))


def remove(name: str | Path, at: int | None = None) -> None:
    """Removes a file or a folder, if it is there, without following links. Raises OSError.

    The folders in a folder are moved to its top one after the other. So it may be of any depth: neither the stack
    nor the number of open files grows.
    """
    try:
        os.unlink(name, dir_fd=at)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        top = os.open(name, _FOLDER, dir_fd=at)
    try:
        left = _empty(top, top)
        while left:
            folder = left.pop()
            there = os.open(folder, _FOLDER, dir_fd=top)
            try:
                left += _empty(there, top)
            finally:
                os.close(there)
            os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=at)


def _empty(folder: int, top: int) -> list[str]:
    """Removes the files in `folder` and moves its folders into `top`. Returns their new names."""
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    new_names = []
    for name, is_folder in children:
        if is_folder:
            new_names.append(f".{secrets.token_hex(16)}")
            os.rename(name, new_names[-1], src_dir_fd=folder, dst_dir_fd=top)
        else:
            os.unlink(name, dir_fd=folder)
    return new_names
