"""A glance at the beginning of a line of rollouts.jsonl: whose attempt it is.

It is quick, and decides about nothing but what to look for: every line is read strictly afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from orchestrator.run.lenient import parse
from orchestrator.run.lines import TextLine

# As this version writes it: the ids come first.
_BEGINS = re.compile(
    rb'\{"schema":1,"rollout_id":"g(\d{1,9})-r(\d{1,6})-a(\d{1,6})","task_id":("(?:[^"\\]|\\.){0,4096}+")',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Whose:
    """Task, and place in its group. `attempt`: how often the place was tried before."""

    task_id: str
    group: int
    index: int
    attempt: int


@dataclass(slots=True)
class Overview:
    """What a record holds. `latest`: the last attempt of each place, by group and index."""

    lines: int = 0
    tasks: set[str] = field(default_factory=set)
    latest: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[TextLine]) -> Overview:
        """From all lines. Raises OSError."""
        found = cls()
        for line in lines:
            found.lines += 1
            if (whose := glance(line.text)) is not None:
                found.tasks.add(whose.task_id)
                place = whose.group, whose.index
                found.latest[place] = max(whose.attempt, found.latest.get(place, 0))
        return found

    def is_superseded(self, whose: Whose) -> bool:
        """Whether a later attempt took its place."""
        return whose.attempt < self.latest.get((whose.group, whose.index), 0)


def glance(text: bytes) -> Whose | None:
    """None: the line is no attempt, or cannot be read."""
    begins = _BEGINS.match(text)
    if begins is not None:
        try:
            return Whose(orjson.loads(begins[4]), int(begins[1]), int(begins[2]), int(begins[3]))
        except orjson.JSONDecodeError:
            return None
    line = parse(text) or {}
    task_id, group, index, attempt = (line.get(name) for name in ("task_id", "group", "index", "attempt"))
    if not (isinstance(task_id, str) and isinstance(group, int) and isinstance(index, int)):
        return None
    return Whose(task_id, group, index, attempt) if isinstance(attempt, int) else None
