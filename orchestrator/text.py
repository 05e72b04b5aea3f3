"""Text from outside, made valid and made comparable."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Literal

# As in Unicode's stream-safe text format (UAX #15): no language needs more.
_MARKS = 30
_PIECE_CHARS = 8_192
_CONJOINING = range(0x1160, 0x1200)  # letters that may melt into the one before, though they are no marks


def valid(text: str) -> str:
    """`text` without halves of characters (lone surrogates), which no encoding has: U+FFFD instead."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def normal_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Unicode's normal form of `text`, marks behind the first 30 on one letter dropped.

    Linear, unlike `unicodedata.normalize`, which sorts the marks on a letter by insertion: a hundred thousand of
    them take it a quarter of a minute. In pieces, so that other threads run meanwhile.
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
    """Whether it may become one with what is before it."""
    return unicodedata.category(char).startswith("M") or ord(char) in _CONJOINING
