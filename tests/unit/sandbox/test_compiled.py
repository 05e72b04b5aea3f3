"""What was compiled with the image is what would be compiled now, and only while the block is entered."""

from __future__ import annotations

import dataclasses
import marshal
import re

import pytest

from sandbox.compiled import Patterns, Sources, compiled, recording

PATTERNS = [(r"(?P<word>\w+)\s+(\d+)", re.I), (rb"[a-f]{2,}?", 0), ("ä|[α-ω]+", re.M | re.X)]


def a_class() -> type:
    @dataclasses.dataclass(frozen=True, slots=True, order=True)
    class Point:
        x: int
        y: list[int] = dataclasses.field(default_factory=list)

    return Point


def kept(sources: Sources, patterns: Patterns) -> tuple[Sources, Patterns]:
    """As they come out of the image's file."""
    return marshal.loads(marshal.dumps((sources, patterns)))  # type: ignore[arg-type]


def test_classes_and_patterns_are_as_without_it() -> None:
    re.purge()
    with recording() as recorded:
        point = a_class()
        usual = [re.compile(*pattern) for pattern in PATTERNS]
    sources, patterns = kept(*recorded)
    assert len(patterns) == len(PATTERNS)
    assert sources
    re.purge()
    with compiled(sources, patterns):
        again = a_class()
        same = [re.compile(*pattern) for pattern in PATTERNS]
    assert [(p.pattern, p.flags, p.groups, dict(p.groupindex)) for p in same] == [
        (p.pattern, p.flags, p.groups, dict(p.groupindex)) for p in usual
    ]
    assert same[0].fullmatch("Word  12")["word"] == "Word"
    assert repr(again(1)) == repr(point(1))
    assert again(1, [2]) == again(1, [2]) < again(3)
    assert again.__init__.__annotations__ == point.__init__.__annotations__
    with pytest.raises(dataclasses.FrozenInstanceError):
        again(1).x = 2


def test_what_is_known_is_not_compiled_again() -> None:
    with recording() as (sources, patterns):
        a_class()
    other = {text: compile("raise KeyError", "", "exec") for text in sources}
    with compiled(other, patterns), pytest.raises(KeyError):
        a_class()


def test_what_is_not_known_is_compiled_as_ever_and_nothing_stays() -> None:
    re.purge()
    before = re._compiler.compile  # type: ignore[attr-defined]
    with compiled({}, {}):
        assert re.compile("a+b").match("aab")
        assert a_class()(3).x == 3
    assert "exec" not in vars(dataclasses)
    assert re._compiler.compile is before  # type: ignore[attr-defined]
