"""Bounding of texts and of output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.runner.bounded_output import BoundedOutput
from sandbox.texts import clip, shorten


@given(st.text(max_size=400), st.integers(0, 300))
def test_a_shortened_text_fits_and_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert "output truncated" in short
        assert len(short) <= max(limit, 70)


@given(st.text(st.characters(codec=None), max_size=100), st.integers(0, 120))
def test_clipped_text_is_valid_utf8_within_its_bytes(text: str, limit: int) -> None:
    assert len(clip(text, limit).encode("utf-8")) <= limit


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 50))
def test_output_is_bounded_however_it_arrives(chunks: list[bytes], max_chars: int) -> None:
    piecewise, at_once = BoundedOutput(max_chars), BoundedOutput(max_chars)
    for chunk in chunks:
        piecewise.append(chunk)
    at_once.append(b"".join(chunks))
    assert piecewise.text() == at_once.text()
    assert len(piecewise.text()) <= max_chars + 70


def test_output_that_fits_is_kept_whole() -> None:
    output = BoundedOutput(10)
    output.append("äöü".encode()[:3])
    output.append("äöü".encode()[3:])
    assert output.text() == "äöü"
