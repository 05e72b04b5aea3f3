"""Whom the agent runs as inside: an image's USER, looked up in the accounts of the image and of its layers."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.errors import ImageUnusable
from orchestrator.launch.uids import RANGE_IDS

_MOST_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def account(user: str, folders: Sequence[Path]) -> tuple[int, int]:
    """(uid, gid) of `user`, as Docker's USER has it: a name or number, and after a colon a group's. Empty: root.
    `folders`: top first. Blocks. Raises ImageUnusable if there is no such user or group."""
    name, _, group = user.partition(":")
    accounts = [line for line in _lines("passwd", folders) if len(line) > 3]
    own = next((line for line in accounts if name in (line[0], line[2])), None)
    uid = _number(name or "0") if own is None else _number(own[2])
    gid = _number(own[3]) if own is not None else 0
    if group:
        groups = (line[2] for line in _lines("group", folders) if len(line) > 2 and group in (line[0], line[2]))
        gid = _number(next(groups, group))
    if uid is None or gid is None:
        raise ImageUnusable(f"the image has no user {user!r}, whom the agent is to run as")
    return uid, gid


def home(uid: int, folders: Sequence[Path]) -> str:
    """The home of a user, by its number. `folders`: as above. Blocks."""
    accounts = (line for line in _lines("passwd", folders) if len(line) > 5 and line[2] == str(uid))
    return next((line[5] for line in accounts if line[5].startswith("/")), "/" if uid else "/root")


def _number(text: str) -> int | None:
    """None: it is none of a sandbox's."""
    return int(text) if text.isdecimal() and len(text) < 6 and int(text) < RANGE_IDS else None


def _lines(name: str, folders: Sequence[Path]) -> Iterator[list[str]]:
    """The fields of the lines of the topmost file /etc/NAME. No link is followed: an image may not show another
    file of this machine."""
    for folder in folders:
        try:
            text = _read(folder, name)
        except OSError:
            continue
        yield from (line.split(":") for line in text.decode("utf-8", "replace").split("\n"))
        return


def _read(folder: Path, name: str) -> bytes:
    """Raises OSError."""
    there = os.open(folder, _FOLDER)
    try:
        etc = os.open("etc", _FOLDER, dir_fd=there)
    finally:
        os.close(there)
    try:
        opened = os.open(name, _FILE, dir_fd=etc)
    finally:
        os.close(etc)
    try:
        return os.pread(opened, _MOST_BYTES, 0) if stat.S_ISREG(os.fstat(opened).st_mode) else b""
    finally:
        os.close(opened)
