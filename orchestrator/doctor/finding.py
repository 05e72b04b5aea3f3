"""One line of the doctor's output."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what a check showed and, unless the level is `ok`, what to do. With `fail` no run can work."""

    level: Level
    what: str
    text: str


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")  # runs work, with a disadvantage
fail = partial(Finding, "fail")
