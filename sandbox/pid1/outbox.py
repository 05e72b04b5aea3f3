"""What model-written code left in `output/`, written to a pipe: regular files only, bounded.

Runs in a process of the worker's identity after every other process of that identity is dead: no process can
exchange a file while it is read, and nothing is opened that the code itself could not open. Records:

    F  length of the path (2 bytes), path, size (8 bytes), content
    E  number of entries left out (4 bytes): links, devices, pipes, unreadable, too deep, over the limits

Big-endian. A stream without an E at its end is incomplete.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_DEPTH = 8
MAX_PATH_BYTES = 1024
MAX_SEEN = 10_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHUNK_BYTES = 64 * 1024


class _LeftOut(Exception):
    """This entry is left out."""


def write_output(folder: Path, pipe: int, *, max_files: int, max_bytes: int) -> int:
    """Writes the files up to the limits; returns an exit code. Where `folder` is no folder, there are no files."""
    files = left_out = 0
    room = max_bytes
    with open(pipe, "wb", closefd=False) as out:
        for parent, name, path in _entries(folder):
            try:
                if parent is None or files >= max_files:
                    raise _LeftOut
                room -= _write_file(out, parent, name, path, room)
                files += 1
            except (_LeftOut, OSError):
                left_out += 1
        out.write(b"E" + left_out.to_bytes(4, "big"))
    return 0


def _entries(folder: Path) -> Iterator[tuple[int | None, bytes, bytes]]:
    """(descriptor of its folder, name, path below `output`) of each entry that is no folder; sorted in a folder.

    The descriptor is None for entries that are left out unseen.
    """
    entries = 0
    try:
        folders = [(os.open(folder, _FOLDER), b"")]
    except OSError:
        return
    while folders:
        parent, above = folders.pop()
        try:
            names = sorted(os.fsencode(entry.name) for entry in os.scandir(parent))
            for name in names:
                path = above + name
                entries += 1
                if entries > MAX_SEEN or len(path) > MAX_PATH_BYTES:
                    yield None, name, path
                    continue
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    yield parent, name, path
                elif path.count(b"/") >= MAX_DEPTH - 1:
                    yield None, name, path
                else:
                    folders.append((os.open(name, _FOLDER, dir_fd=parent), path + b"/"))
        except OSError:
            yield None, b"", above
        finally:
            os.close(parent)


def _write_file(out: BinaryIO, parent: int, name: bytes, path: bytes, room: int) -> int:
    """Returns the size. Before it writes, raises _LeftOut, or OSError where the file cannot be opened."""
    file = os.open(name, _FILE, dir_fd=parent)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > room:
            raise _LeftOut
        out.write(b"F" + len(path).to_bytes(2, "big") + path + status.st_size.to_bytes(8, "big"))
        rest = status.st_size
        while rest > 0:
            try:
                content = os.read(file, min(_CHUNK_BYTES, rest))
            except OSError:
                content = b""
            if not content:
                raise SystemExit(1)  # the announced size cannot be kept: the stream stays without its E
            out.write(content)
            rest -= len(content)
    finally:
        os.close(file)
    return status.st_size
