"""Lines of a file, each of bounded length, so that no file can use up the memory."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.tasks.pointers import MAX_POINTER_BYTES, pointer_of

MAX_LINE_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"
_FORMATS = {
    b"\x1f\x8b": "compressed: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it with unzstd",
    b"BZh": "compressed: unpack it with bunzip2",
    b"\xfd7zXZ": "compressed: unpack it with unxz",
    b"PK\x03\x04": "an archive or a workbook: unpack it, or save it as CSV",
    b"PAR1": "a parquet file: name its folder with hf:",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}


def check_lines(path: Path, flag: str, *, array: str = "") -> None:
    """Raises ConfigError unless `path` is a regular file that can be opened and holds lines of text. `array`: what
    to do about one that begins as a JSON array; empty: it may."""
    beginning = check_readable(path, flag)
    for start, description in _FORMATS.items():
        if beginning.startswith(start):
            raise ConfigError(f"{flag}: {path} is {description}")
    if array and beginning.removeprefix(_BOM).lstrip().startswith(b"["):
        raise ConfigError(f"{flag}: {path} is {array}")


def check_readable(path: Path, flag: str) -> bytes:
    """The beginning of a file. Raises ConfigError unless it is regular, can be opened, and is no pointer."""
    try:
        if not stat.S_ISREG((status := os.stat(path)).st_mode):
            raise ConfigError(f"{flag}: {path} is no regular file")
        with open(path, "rb") as file:
            beginning = file.read(MAX_POINTER_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{flag}: cannot read {path}: {reason}; name an existing file") from error
    if (pointer := pointer_of(beginning, status.st_size)) is not None:
        raise ConfigError(f"{flag}: {path} is {pointer}")
    return beginning


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
