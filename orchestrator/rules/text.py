"""Makes text from outside valid, comparable and fit for a terminal."""

import keyword
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

MAX_JSON_INTEGER = 1 << 53  # every JSON reader keeps whole numbers up to this exact
_NAME_BYTES, _PATH_BYTES = 255, 4096  # Linux' limits; the latter counts the byte that ends it
LINE_CHARS = 200  # of a text from outside that is shown on one line
# As in Unicode's stream-safe text format (UAX #15): no language needs more.
_MARKS = 30
_PIECE_CHARS = 8_192
_MARKS_SHOWN = 4  # more would cover the lines above and below
# Characters that `isprintable` accepts but no terminal shows: fillers, joiners, variation selectors.
_UNSEEN = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0x180B, 0x1810)))
) | frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_CONJOINING = range(0x1160, 0x1200)  # Hangul letters: no marks, but normalization may join them


def valid(text: str) -> str:
    """`text` with U+FFFD in place of lone surrogates, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def objects_in(text: bytes) -> int:
    """How many objects and arrays a JSON text holds. In memory an empty one takes twenty times its text, and
    reading many holds up everybody."""
    return _brackets(_JSON_STRING.sub(b"", text))


def holds_more(text: bytes, objects: int) -> bool:
    """Whether `objects_in` a text are more than this: found sooner, as nearly always they are not."""
    return _brackets(text) > objects and objects_in(text) > objects


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def printable(text: str, instead: str = " ") -> str:
    """`text` as one line that a terminal shows as it is: no character moves the cursor, sets colours, changes the
    direction of writing or is invisible. `instead` replaces such characters; marks after a letter's fourth go."""
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for char in text:
        marks = marks + 1 if unicodedata.category(char).startswith("M") else 0
        if marks <= _MARKS_SHOWN:
            # Control characters, formats (Cf: bidi, zero-width), surrogates, private and unknown ones, separators.
            shown.append(char if char.isprintable() and char not in _UNSEEN else instead)
    return "".join(shown)


def printable_lines(text: str) -> str:
    """As `printable`, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def normal_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Unicode's normal form of `text`; marks after the first 30 on one letter are dropped.

    Linear in the length. `unicodedata.normalize` alone sorts the marks on a letter by insertion and needs a
    quarter of a minute for a hundred thousand. Done in pieces, so that other threads run in between.
    """
    if text.isascii():
        return text
    return "".join(unicodedata.normalize(form, piece) for piece in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    piece: list[str] = []
    marks = 0
    for char in text:
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks > _MARKS:
            continue
        if len(piece) >= _PIECE_CHARS and not _joins(char):
            yield "".join(piece)
            piece = []
        piece.append(char)
    yield "".join(piece)


def _joins(char: str) -> bool:
    """Whether normalization may join the character to the one before."""
    return unicodedata.category(char).startswith("M") or ord(char) in _CONJOINING


def one_line(text: str) -> str:
    """Text from a network or a sandbox made fit for a terminal: printable, on one line, shortened."""
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= LINE_CHARS else plain[: LINE_CHARS - 1] + "…"


def error_line(error: BaseException, chars: int = 300) -> str:
    """An exception of somebody else's code on one line: its type and its text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:chars]


def path_of(text: str) -> Path:
    """The path with `~` and `~user` filled in. Raises ValueError if Linux allows no file of such a path."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # no such user, or one without a home
        raise ValueError from None
    if len(os.fsencode(path)) >= _PATH_BYTES or any(len(os.fsencode(name)) > _NAME_BYTES for name in path.parts):
        raise ValueError
    return path


def is_name(text: object) -> bool:
    """Whether a tool or an agent can have this name in Python code."""
    return isinstance(text, str) and text.isidentifier() and text.isascii() and not keyword.iskeyword(text)
