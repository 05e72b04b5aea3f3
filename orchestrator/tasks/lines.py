"""Lines of a file, each of bounded length, so that no file can use up the memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"


def check_readable(path: Path, flag: str) -> None:
    """Raises ConfigError unless `path` is a regular file that can be opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{flag}: {path} is no regular file")
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{flag}: cannot read {path}: {reason}; name an existing file") from error


def read_lines(path: Path, flag: str) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line without its end); None in the place of a line over MAX_LINE_BYTES.

    Raises ConfigError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                    continue
                yield number, (line.removeprefix(_BOM) if number == 1 else line).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
