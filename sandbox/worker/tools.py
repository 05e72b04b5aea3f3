"""File tools for text under plain names: `read_file`, `write_file`, `append_to_file`.

They run in the code worker, with its rights. Relative paths start at the working directory, as those of `open` do.
"""

import codecs
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sandbox.types import ToolSpec

MAX_READ_BYTES = 64 << 20
_MARKS = (  # UTF-32 first: its little-endian mark begins like that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PATH = {"type": "string", "description": "Path of the file, absolute or relative to the working directory."}

FILE_TOOLS = (
    ToolSpec("read_file", "Reads a text file in any encoding and returns its content.", {"path": _PATH}, "string"),
    ToolSpec(
        "write_file",
        "Writes text to a file, replacing what was there. Directories on the way are created.",
        {"path": _PATH, "content": {"type": "string", "description": "The text to write."}},
        "string",
    ),
    ToolSpec(
        "append_to_file",
        "Adds text to the end of a file. The file is created if it does not exist.",
        {"path": _PATH, "content": {"type": "string", "description": "The text to add."}},
        "string",
    ),
)


def read_file(path: str) -> str:
    """The text of a file. Raises OSError, and ValueError for a file that is too large or no text."""
    place = _resolve(path)
    size = place.stat().st_size
    if size > MAX_READ_BYTES:
        raise ValueError(f"{place} has {size} bytes, too many to read at once: open() it and read in pieces")
    return decode_text(place.read_bytes(), str(place))


def write_file(path: str, content: str) -> str:
    """Raises OSError."""
    return _write(path, content, "w", "Wrote")


def append_to_file(path: str, content: str) -> str:
    """Raises OSError."""
    return _write(path, content, "a", "Appended")


FILE_FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "read_file": read_file,
    "write_file": write_file,
    "append_to_file": append_to_file,
}


def _write(path: str, content: str, mode: str, done: str) -> str:
    if not isinstance(content, str):
        raise TypeError(f"the content must be text, not {type(content).__name__}")
    place = _resolve(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open(mode, encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(content)
    return f"{done} {len(content)} characters to {place}"


def _resolve(path: str) -> Path:
    return Path(os.path.expanduser(os.fspath(path))).absolute()


def decode_text(content: bytes, name: str) -> str:
    """Text by its byte order mark, else UTF-8, else Windows-1252 or Latin-1. Raises ValueError for binary data."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return _plain_newlines(content.decode(encoding, "replace"))
    if b"\0" in content:
        raise ValueError(
            f"{name} is a binary file of {len(content)} bytes, not text: use open(path, 'rb') or a library"
        )
    for encoding in ("utf-8", "cp1252"):
        try:
            return _plain_newlines(content.decode(encoding))
        except UnicodeDecodeError:
            continue
    return _plain_newlines(content.decode("latin-1"))  # never fails


def _plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
