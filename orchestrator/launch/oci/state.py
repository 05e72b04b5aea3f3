"""The part of what a sandbox wrote to its root that another sandbox gets as a layer. Runs in the keeper, as root
of the machine or of this user's namespace, when nothing writes there any more.

What is in scope is moved, what is not is removed: nothing is copied, so it costs the same for files of any size.
Model-written code filled the folder: each step opens one name in one folder and follows nothing. Only the standard
library is imported.
"""

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from orchestrator.launch.oci.mounts import UPPER, WRITTEN
from orchestrator.launch.oci.tree import remove

SCOPED = "scoped"  # in the folder WRITTEN, beside UPPER
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACCESS = "system.posix_acl_access"
_DEPTH = 64  # of folders, each of which holds a descriptor; what lies deeper is not kept


class StateScope(NamedTuple):
    """What is in scope. `kept`: absolute paths, none of which lies in another one; None: all. `dropped`: a pattern
    of paths that are not kept all the same; those of folders end with `/`. `merged`: a pattern of folders that
    hide nothing of what lies below them. Empty: none. `mark`: the attribute of folders that do."""

    kept: Sequence[str] | None
    dropped: str
    merged: str
    mark: str


def state_in_scope(folder: str, scope: StateScope, lowers: Sequence[str], owner: int, shift: int) -> str:
    """The folder that is the layer. `folder`: of the sandbox that ended. Raises OSError.

    `lowers`: what lay below, top first: folders on the way to what is kept are as they are there. `owner`: of the
    root. `shift`: from ids there to those of the agent.
    """
    written, state = os.path.join(folder, WRITTEN), os.path.join(folder, WRITTEN, UPPER)
    if scope.kept is not None:
        upper, state = state, os.path.join(written, SCOPED)
        with suppress(FileExistsError):  # it was graded before
            os.mkdir(state)
            os.chmod(state, 0o755)  # noqa: S103 - the mode of the sandbox's root
            os.chown(state, owner, owner)
            _move(upper, state, scope.kept, _Below(lowers, shift), scope.mark)
    if scope.dropped:
        top = os.open(state, _FOLDER)
        try:
            _drop(top, "/", re.compile(scope.dropped), re.compile(scope.merged or "$^"), scope.mark, _DEPTH)
        finally:
            os.close(top)
    return state


def clear_way(state: str, places: Sequence[str]) -> None:
    """Opens the folders on the way to these places to all, and removes what is none: an agent must not decide
    whether another sandbox can mount something there, and find it. Raises OSError."""
    for place in places:
        at = os.open(state, _FOLDER)
        try:
            for name in place.strip("/").split("/"):
                try:
                    status = os.stat(name, dir_fd=at, follow_symlinks=False)
                except FileNotFoundError:
                    break
                if not stat.S_ISDIR(status.st_mode):
                    if not stat.S_ISCHR(status.st_mode):  # else the agent removed it, and it is made anew
                        os.unlink(name, dir_fd=at)
                    break
                inner = os.open(name, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
                with suppress(OSError):  # it has none
                    os.removexattr(at, _ACCESS)
                os.fchmod(at, stat.S_IMODE(status.st_mode) | 0o555)
        finally:
            os.close(at)


def copy_written(source: str, folder: str, mark: str) -> None:
    """Makes FOLDER/written/upper a copy of the sandbox' own, in the same file system: folders are made anew, all
    else is linked, as nothing changes while the copy is there. Raises OSError."""
    target = os.path.join(folder, WRITTEN, UPPER)
    os.makedirs(target)
    opened = [os.open(path, _FOLDER) for path in (os.path.join(source, WRITTEN, UPPER), target)]
    try:
        _copy(opened[0], opened[1], mark, _DEPTH)
    finally:
        for one in opened:
            os.close(one)


def _copy(source: int, target: int, mark: str, depth: int) -> None:
    with os.scandir(source) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children if depth else ():
        if not is_folder:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            continue
        os.mkdir(name, 0o700, dir_fd=target)
        inner = [os.open(name, _FOLDER, dir_fd=at) for at in (source, target)]
        try:
            _copy(inner[0], inner[1], mark, depth - 1)
        finally:
            for one in inner:
                os.close(one)
    status = os.fstat(source)
    with suppress(OSError):  # it has no such mark
        os.setxattr(target, mark, os.getxattr(source, mark))
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


class _Below:
    """What lay below the folder that took what was written. `shift`: from ids there to those of the agent."""

    def __init__(self, lowers: Sequence[str], shift: int) -> None:
        self._lowers, self._shift = lowers, shift

    def folder(self, way: Sequence[str]) -> os.stat_result | None:
        """Of the topmost folder of this way; None: there is none. Raises NotADirectoryError if it is a link or a
        file."""
        for lower in self._lowers:
            at = os.open(lower, _FOLDER)
            try:
                for name in way:
                    inner = os.open(name, _FOLDER, dir_fd=at)
                    os.close(at)
                    at = inner
                return os.fstat(at)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise NotADirectoryError(error.errno, "a link or a file is on the way") from error
            finally:
                os.close(at)
        return None

    def ids(self, status: os.stat_result) -> tuple[int, int]:
        return status.st_uid + self._shift, status.st_gid + self._shift


def _move(upper: str, scope: str, kept: Sequence[str], below: _Below, mark: str) -> None:
    for path in kept:
        way = [part for part in path.split("/") if part]
        if not way or {".", ".."} & {*way}:
            raise OSError(0, f"{path!r} is no path of what is kept")
        source = _Way(upper, way[:-1], mark)
        try:
            there = source.status(way[-1])
            if there is None and not source.hides:
                continue  # it is what it was
            with suppress(NotADirectoryError):  # in the image it lies behind a link: the agent's folder is not it
                target = _make_way(scope, way[:-1], source.statuses, below)
                try:
                    if there is None:
                        os.mknod(way[-1], stat.S_IFCHR, 0, dir_fd=target)  # it was removed
                        continue
                    os.rename(way[-1], way[-1], src_dir_fd=source.at, dst_dir_fd=target)
                    if source.hides and stat.S_ISDIR(there.st_mode):
                        opened = os.open(way[-1], _FOLDER, dir_fd=target)
                        os.setxattr(opened, mark, b"y")
                        os.close(opened)
                finally:
                    os.close(target)
        finally:
            os.close(source.at)


class _Way:
    """The last folder of a way, as far as it is there. `hides`: whether something on the way hides what lies
    below."""

    def __init__(self, top: str, way: Sequence[str], mark: str) -> None:
        self.at = os.open(top, _FOLDER)
        self.hides = self._broken = False
        self.statuses: list[os.stat_result] = []
        for name in way:
            status = self.status(name)
            if status is None or not stat.S_ISDIR(status.st_mode):
                self.hides |= status is not None
                self._broken = True
                return
            inner = os.open(name, _FOLDER, dir_fd=self.at)
            os.close(self.at)
            self.at = inner
            self.statuses.append(status)
            with suppress(OSError):  # it has no such mark
                self.hides |= os.getxattr(inner, mark) == b"y"

    def status(self, name: str) -> os.stat_result | None:
        """None: there is nothing of this name."""
        if self._broken:
            return None
        try:
            return os.stat(name, dir_fd=self.at, follow_symlinks=False)
        except FileNotFoundError:
            return None


def _make_way(scope: str, way: Sequence[str], statuses: Sequence[os.stat_result], below: _Below) -> int:
    """A descriptor of the last folder. `statuses`: of the agent's folders, for those that are its own."""
    at = os.open(scope, _FOLDER)
    try:
        for depth, name in enumerate(way):
            status = below.folder(way[: depth + 1])
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=at)
            inner = os.open(name, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
            if status is not None:
                os.fchown(at, *below.ids(status))
                os.fchmod(at, stat.S_IMODE(status.st_mode))
            elif depth < len(statuses):
                os.fchown(at, statuses[depth].st_uid, statuses[depth].st_gid)
                os.fchmod(at, stat.S_IMODE(statuses[depth].st_mode) & 0o777)
            else:
                os.fchmod(at, 0o755)
    except BaseException:
        os.close(at)
        raise
    return at


def _drop(
    folder: int, path: str, dropped: re.Pattern[str], merged: re.Pattern[str], mark: str, depth: int
) -> None:
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        whole = f"{path}{name}/" if is_folder else path + name
        if dropped.match(whole) or (is_folder and depth == 0):
            remove(name, folder)
        elif is_folder:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                if merged.match(whole):
                    with suppress(OSError):  # it has no such mark
                        os.removexattr(inner, mark)
                _drop(inner, whole, dropped, merged, mark, depth - 1)
            finally:
                os.close(inner)
