"""Makes groups of rollouts that were scored again, by the rules of a run, from the record alone.

Nothing can be drawn again here: a group that lacks a rollout is left out, or kept with those it has (partial:K).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import TypeVar

import orjson

from orchestrator.engine.group import GroupPolicy, verdict
from orchestrator.rescoring.decode import LARGE, Line
from orchestrator.rescoring.rescore import Rescored
from orchestrator.run.groups import group_line, settle
from orchestrator.run.lines import dumps
from orchestrator.types import Failed, Score

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A scored attempt. `offset`, `size`: where its lines are."""

    attempt: int
    score: Score
    offset: int
    size: int


@dataclass(slots=True)
class _Group:
    """Scored attempts by place, and why others have no score. `size`: how many rollouts it was to have."""

    size: int
    task_id: str
    places: dict[int, list[_Kept]] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Made:
    """A group: its number, its task, its lines (none if it is no training data, for the reason `dropped`), its
    scores."""

    number: int
    task_id: str
    lines: tuple[bytes, ...]
    scores: tuple[float, ...]
    dropped: str | None = None


class Grouping:
    """Collects rollouts in any order and makes groups of them. Ids and texts wait in a file without a name.

    `group_size`: of groups whose record does not say it.
    """

    def __init__(self, folder: Path, policy: GroupPolicy, group_size: int) -> None:
        self._policy = policy
        self._size = group_size
        self._groups: dict[int, _Group] = {}
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - closed on exit

    def __enter__(self) -> Grouping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rollout: Rescored) -> None:
        """Takes a rollout, scored or not. Raises OSError."""
        after = rollout.after
        group = self._groups.setdefault(after.group, _Group(after.group_size or self._size, after.task_id))
        if isinstance(after.outcome, Failed):
            group.failures.append(after.outcome)
        if after.score is None:
            return
        packed = pickle.dumps(rollout.lines)
        offset = self._file.seek(0, 2)
        self._file.write(packed)
        kept = _Kept(after.attempt, after.score, offset, len(packed))
        group.places.setdefault(after.index, []).append(kept)

    def groups(self) -> Iterator[Made]:
        """All groups, in the order of their numbers. Raises OSError."""
        for number in sorted(self._groups):
            group = self._groups[number]
            places = {index: sorted(kept, key=attrgetter("attempt")) for index, kept in group.places.items()}
            members = drawn(places, self._policy.enough(group.size))
            scores = tuple(member.score.value for member in members)
            dropped = verdict(self._policy, group.size, scores, group.failures)
            yield Made(number, group.task_id, () if dropped else self._lines(members), scores, dropped)

    def _lines(self, members: Sequence[_Kept]) -> tuple[bytes, ...]:
        """The group's line, and one for each side line that all members have."""
        together = list(zip(*(self._read(member) for member in members), strict=False))
        for lines in zip(*together, strict=True):
            settle([line.entry["overrides"] for line in lines])
        return tuple(_joined(lines, members) for lines in together)

    def _read(self, member: _Kept) -> tuple[Line, ...]:
        self._file.seek(member.offset)
        lines: tuple[Line, ...] = pickle.loads(self._file.read(member.size))  # noqa: S301 - our own
        return lines


def drawn(places: Mapping[int, Sequence[T]], enough: int) -> list[T]:
    """One scored attempt for each place, in the order of the places, of attempts in the order they were made.

    A place has two if the run drew the whole group once more (`zero_variance resample`): then the second draw is
    the group, unless so much of it broke that not `enough` are left.
    """
    draws = [places[index] for index in sorted(places)]
    second = [draw[-1] for draw in draws if len(draw) > 1]
    if second and len(second) < enough:
        return [draw[0] for draw in draws]
    return second or [draw[-1] for draw in draws]


def _joined(lines: Sequence[Line], members: Sequence[_Kept]) -> bytes:
    entries = []
    for line, member in zip(lines, members, strict=True):
        entry = {**line.entry, "scores": float(member.score.value)}
        entry["overrides"] = {**entry["overrides"], "score_parts": dict(member.score.parts)}
        for name in LARGE:
            entry[name] = None if entry[name] is None else orjson.Fragment(entry[name])
        entries.append(entry)
    return dumps(group_line(entries, lines[0].sampling)) + b"\n"
