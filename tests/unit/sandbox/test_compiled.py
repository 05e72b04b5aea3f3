"""What was compiled with the image is what would be compiled now, and only while the block is entered."""

from __future__ import annotations

import dataclasses
import marshal
import re

import pytest
from jinja2 import StrictUndefined, Template, UndefinedError

from sandbox.boot.compiled import Compiled, compiled, recording, remembered
from sandbox.runner.agent import _template

PATTERNS = [(r"(?P<word>\w+)\s+(\d+)", re.I), (rb"[a-f]{2,}?", 0), ("ä|[α-ω]+", re.M | re.X)]


def a_class() -> type:
    @dataclasses.dataclass(frozen=True, slots=True, order=True)
    class Point:
        x: int
        y: list[int] = dataclasses.field(default_factory=list)

    return Point


def kept(made: Compiled) -> Compiled:
    """As it comes out of the image's file."""
    return marshal.loads(marshal.dumps(made))  # type: ignore[arg-type,no-any-return]


def test_classes_and_patterns_are_as_without_it() -> None:
    re.purge()
    with recording() as recorded:
        point = a_class()
        usual = [re.compile(*pattern) for pattern in PATTERNS]
    assert {key[:2] for key in recorded if key[0] == "pattern"} >= {("pattern", p) for p, _ in PATTERNS}
    re.purge()
    with compiled(kept(recorded)):
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
    with recording() as recorded:
        a_class()
    other = {key: compile("raise KeyError", "", "exec") for key in recorded if key[0] == "class"}
    with compiled(other), pytest.raises(KeyError):
        a_class()
    with compiled({("template", "x"): 1}):
        assert remembered(("template", "x"), lambda: 2) == 1
    assert remembered(("template", "x"), lambda: 2) == 2


def test_what_is_not_known_is_compiled_as_ever_and_nothing_stays() -> None:
    re.purge()
    before = re._compiler.compile  # type: ignore[attr-defined]
    with compiled({}):
        assert re.compile("a+b").match("aab")
        assert a_class()(3).x == 3
    assert "exec" not in vars(dataclasses)
    assert re._compiler.compile is before  # type: ignore[attr-defined]


def test_a_prompt_is_rendered_as_by_jinja2_itself() -> None:
    source = "{% for n in names -%}\n{{ n }}{% if not loop.last %}, {% endif %}\n{%- endfor %}\n"
    ours = _template(source, StrictUndefined)
    assert ours.render(names=["<a>", 2]) == Template(source, undefined=StrictUndefined).render(names=["<a>", 2])
    with pytest.raises(UndefinedError):
        ours.render()
