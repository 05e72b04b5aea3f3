"""Text from outside: the same normal forms as the library's, in linear time."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules import text as module
from orchestrator.rules.text import normal_form, valid

# Marks of several classes, letters made of others, syllables that melt together, one that becomes eighteen.
LETTERS = "Aé \u0301\u0323\u0344ﷺ\u1100\u1161\u11a8\uac00\u09c7\u09be\u1025\u102eﬃ\u304b\u3099\U00011131\U00011127"


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
@given(text=st.text(st.sampled_from(LETTERS), max_size=25) | st.text())
def test_pieces_have_the_normal_form_of_the_whole(form: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARS", 3)
        assert normal_form(form, text) == unicodedata.normalize(form, text)  # type: ignore[arg-type]


def test_no_letter_melts_into_another_where_a_piece_may_begin() -> None:
    for code in range(0x110000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            first, second = (chr(int(part, 16)) for part in parts)
            composes = unicodedata.normalize("NFC", first + second) == chr(code)
            assert not composes or module._joins(second)


def test_no_more_marks_are_sorted_than_a_language_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    normalize = unicodedata.normalize

    def watched(form: Literal["NFC", "NFKC"], text: str) -> str:
        sizes.append(len(text))
        return normalize(form, text)

    monkeypatch.setattr(unicodedata, "normalize", watched)
    assert len(normal_form("NFKC", "e" + "\u0301" * 100_000 + "\u0323" * 100_000)) <= 31
    assert sizes == [31]


def test_halves_of_characters_become_one_sign() -> None:
    assert valid("a \ud83d b") == "a \ufffd b"
    assert valid("\ud83d\ude00 é") == "\U0001f600 é"
    assert valid(whole := "whole é") is whole
