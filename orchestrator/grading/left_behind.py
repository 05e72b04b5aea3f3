"""Reads what a grader left in its sandbox, from the folder that took what it wrote. Untrusted: what the tests ran
may have written it. Each step opens one name in one folder and follows nothing; sizes are bounded. Raises OSError
where it is this machine that fails: that is not the same as a file that is not there.
"""

import errno
import os
import stat
from collections.abc import Sequence

LOGS = ("logs", "verifier")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NAMES = 200
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


class TooLarge(Exception):
    """A file has more bytes than are read."""


class LeftBehind:
    """`top`: a descriptor of the folder. Use it as a context manager."""

    def __init__(self, top: int, way: Sequence[str] = LOGS) -> None:
        self._at: int | None = os.open(".", _FOLDER, dir_fd=top)
        for name in way:
            try:
                inner = os.open(name, _FOLDER, dir_fd=self._at)
            except OSError as error:
                os.close(self._at)
                self._at = None
                if error.errno in _OF_THE_MACHINE:
                    raise
                return  # it is not there, or is a link
            os.close(self._at)
            self._at = inner

    def __enter__(self) -> "LeftBehind":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._at is not None:
            os.close(self._at)

    def names(self) -> list[str]:
        """Some of the folder's names, in order."""
        if self._at is None:
            return []
        with os.scandir(self._at) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(_NAMES), strict=False))

    def read(self, name: str, most: int) -> bytes | None:
        """A file's content. None: there is no such file that can be read. Raises TooLarge."""
        if self._at is None:
            return None
        try:
            opened = os.open(name, _FILE, dir_fd=self._at)
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise
            return None
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return None
            content = file.read(most + 1)
        if len(content) > most:
            raise TooLarge(f"{name} has more than {most} bytes")
        return content
