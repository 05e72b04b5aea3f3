"""Files of tasks: found without following links, checked, and later opened safely.

File names come from data sets, and the folder may change between planning and launch. So every path is walked
component by component (`openat` with O_NOFOLLOW), when the task is read and whenever the file is opened. The proxy
sends the bytes into a sandbox.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.pointers import MAX_POINTER_BYTES, pointer_of
from orchestrator.types import Attachment

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 256 << 20
MAX_FILES = 64
MAX_NAME_BYTES = 200  # below the 255 of a file system, with room for the `-2` of a second file

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening must not block if a named pipe has taken the file's place.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_REASONS = {
    errno.ELOOP: "is a link, and links are not followed",
    errno.ENOTDIR: "lies behind a link or a file",  # O_DIRECTORY is checked before O_NOFOLLOW
    errno.ENOENT: "does not exist in the dataset's folder",
}


def attach(root: Path, names: Sequence[str | bytes]) -> tuple[Attachment, ...]:
    """The files `names` below `root`, each with the name the agent will see. Raises BadRow.

    The path of `root`, which the operator chose, may have links; below it no link is followed.
    """
    if len(names) > MAX_FILES:
        raise BadRow(f"{len(names)} files, at most {MAX_FILES} are allowed")
    attachments: list[Attachment] = []
    names_in_use: set[str] = set()
    for number, name in enumerate(names, start=1):
        path = Path(os.path.realpath(root), *_components(name))
        size = _size(path, _quoted(name))
        visible = _visible_name(path.name, number, names_in_use)
        names_in_use.add(visible)
        attachments.append(Attachment(visible, path, size))
    total = sum(attachment.size_bytes for attachment in attachments)
    if total > MAX_TOTAL_BYTES:
        raise BadRow(f"the files have {total} bytes together, at most {MAX_TOTAL_BYTES} are allowed")
    return tuple(attachments)


def open_attachment(attachment: Attachment) -> BinaryIO:
    """The file, if it is still a regular file of the same size. Raises OSError."""
    with _parent(attachment.path) as directory:
        descriptor = os.open(attachment.path.name, _FILE, dir_fd=directory)
    file = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != attachment.size_bytes:
        file.close()
        raise OSError(errno.ESTALE, "the file changed after the task was read")
    return file


def _components(name: str | bytes) -> list[str]:
    """The parts of a relative path. Raises BadRow for one that leaves its folder."""
    text = os.fsdecode(name)
    label = _quoted(name)
    if not text.strip() or "\0" in text:
        raise BadRow(f"file name {label} is empty or has a NUL in it")
    if text.startswith("/"):
        raise BadRow(f"file {label} is an absolute path; it must be relative to the dataset's folder")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise BadRow(f"file {label} leaves the dataset's folder")
    return parts


def _size(path: Path, label: str) -> int:
    try:
        with _parent(path) as directory:
            status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if not stat.S_ISREG(status.st_mode):
                raise BadRow(f"file {label} is no regular file")
            # Opened once here, so that an unreadable file is a bad task and not a lost rollout.
            with open(os.open(path.name, _FILE, dir_fd=directory), "rb") as file:
                beginning = file.read(MAX_POINTER_BYTES)
    except OSError as error:
        raise BadRow(f"file {label}: {_REASONS.get(error.errno or 0, error.strerror)}") from error
    except UnicodeEncodeError as error:
        raise BadRow(f"file {label} cannot be a file name here") from error
    if (pointer := pointer_of(beginning, status.st_size)) is not None:
        raise BadRow(f"file {label} is {pointer}")
    if status.st_size > MAX_FILE_BYTES:
        raise BadRow(f"file {label} has {status.st_size} bytes, at most {MAX_FILE_BYTES} are allowed")
    return status.st_size


@contextmanager
def _parent(path: Path) -> Iterator[int]:
    """A descriptor of the folder of an absolute `path`, reached without following any link."""
    with ExitStack() as stack:
        directory = os.open("/", _DIRECTORY)
        stack.callback(os.close, directory)
        for part in path.parts[1:-1]:
            directory = os.open(part, _DIRECTORY, dir_fd=directory)
            stack.callback(os.close, directory)
        yield directory


def _visible_name(name: str, number: int, names_in_use: set[str]) -> str:
    """The original name if it is printable and not too long, else a neutral one; never one in `names_in_use`."""
    extension = re.search(r"\.[A-Za-z0-9]{1,10}\Z", name)
    neutral = f"attachment-{number}{extension.group() if extension else ''}"
    # isprintable: no control or format character, no lone surrogate, no line separator.
    if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        name = neutral
    stem, dot, suffix = name.rpartition(".")
    if not stem:
        stem, dot, suffix = name, "", ""
    visible, copy = name, 1
    while visible in names_in_use:
        copy += 1
        visible = f"{stem}-{copy}{dot}{suffix}"
    return visible


def _quoted(name: str | bytes) -> str:
    """The name for error texts: on one line, shortened."""
    text = ascii(os.fsdecode(name))
    return text if len(text) <= 120 else f"{text[:100]}…'"
