"""Files that stand for others, as git leaves them where large files were not fetched."""

import os
from pathlib import Path

from orchestrator.errors import ConfigError

MAX_POINTER_BYTES = 1024
_BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer and not the file itself: run `git lfs pull`",
    b"version https://hawser.github.com/spec/": "a Git LFS pointer and not the file itself: run `git lfs pull`",
    b"/annex/objects/": "a git-annex pointer and not the file itself: run `git annex get`",
}
_MAX_FILES = 10_000  # of a folder that is looked through


def pointer_of(beginning: bytes, size_bytes: int) -> str | None:
    """What a file is that begins so, and what to do; None: it is no pointer."""
    if size_bytes > MAX_POINTER_BYTES:
        return None
    return next((description for start, description in _BEGINNINGS.items() if beginning.startswith(start)), None)


def pointer_in(path: Path) -> str | None:
    """The same of a file; None if it cannot be read, too."""
    try:
        size = path.stat().st_size
        return None if size > MAX_POINTER_BYTES else pointer_of(path.read_bytes(), size)
    except OSError:
        return None


def refuse_pointers(folder: Path, flag: str) -> None:
    """Raises ConfigError if a file in the folder is a pointer: libraries would take it for data."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            count += 1
            if count > _MAX_FILES:
                return
            if (pointer := pointer_in(Path(place, name))) is not None:
                raise ConfigError(f"{flag}: {Path(place, name)} is {pointer}")
