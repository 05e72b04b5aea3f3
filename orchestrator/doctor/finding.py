"""One line of the doctor's output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what was found and, unless all is well, what to do. Level `fail`: no run can work like this."""

    level: Level
    what: str
    text: str


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")  # runs work, but there is something to know
fail = partial(Finding, "fail")
