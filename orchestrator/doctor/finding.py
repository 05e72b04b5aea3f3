"""One line of the doctor's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what was found and, unless all is well, what to do. Level `fail`: no run can work like this."""

    level: Level
    what: str
    text: str


def ok(what: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", what, text)


def warn(what: str, text: str) -> Finding:
    """Runs work, with something to know."""
    return Finding("warn", what, text)


def fail(what: str, text: str) -> Finding:
    """Runs do not work."""
    return Finding("fail", what, text)
