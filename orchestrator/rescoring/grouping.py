"""Makes the groups of a record that was scored again, by the rules of a run.

Nothing can be drawn again here: a group that lacks a rollout is left out, or kept with those it has (partial:K).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from orchestrator.engine.group import GroupPolicy, verdict
from orchestrator.run.earlier import restored
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import dumps, text_at
from orchestrator.run.replay import plan_of
from orchestrator.types import Failed, Group, Member, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Scored:
    """A scored attempt. `offset`: where its line begins in the new record."""

    attempt: int
    score: float
    offset: int


@dataclass(slots=True)
class _Place:
    """Scored attempts by index, and why others have no score. `size`: how many rollouts the group was to have."""

    size: int
    task_id: str
    members: dict[int, list[_Scored]] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MadeGroup:
    """A group: its number, its task, its lines of the groups file; none if it is no training data, for the reason
    `dropped`."""

    number: int
    task_id: str
    lines: tuple[bytes, ...]
    dropped: str | None = None


class Grouping:
    """Collects rollouts in any order. Memory holds a few words of each, and one group as it is made.

    `group_size`: of groups whose record does not say it.
    """

    def __init__(self, policy: GroupPolicy, group_size: int) -> None:
        self._policy = policy
        self._size = group_size
        self._groups: dict[int, _Place] = {}

    def add(self, attempt: RecordedAttempt, offset: int) -> None:
        """Takes an attempt, scored or not, whose line begins at `offset` of the new record."""
        size = attempt.group_size or self._size
        group = self._groups.setdefault(attempt.group, _Place(size, attempt.task_id))
        if isinstance(attempt.outcome, Failed):
            group.failures.append(attempt.outcome)
        if attempt.score is not None:
            scored = _Scored(attempt.attempt, attempt.score.value, offset)
            group.members.setdefault(attempt.index, []).append(scored)

    def groups(self, record: Path, tasks: Mapping[str, Task | str], form: GroupFormat) -> Iterator[MadeGroup]:
        """All groups, in the order of their numbers. `tasks`: of all scored attempts. Raises OSError."""
        for number in sorted(self._groups):
            group = self._groups[number]
            places = {index: sorted(each, key=attrgetter("attempt")) for index, each in group.members.items()}
            members = drawn(places, self._policy.enough(group.size))
            dropped = verdict(self._policy, group.size, [member.score for member in members], group.failures)
            lines: tuple[bytes, ...] = ()
            if dropped is None:
                members_G = tuple(_member(record, one.offset, tasks, form) for one in members)
                attempts = tuple(member.attempt for member in members_G)
                whole = Group(number, attempts[0].plan.task, members_G, attempts)
                lines = tuple(dumps(line) + b"\n" for line in form.groups(whole))
            yield MadeGroup(number, group.task_id, lines, dropped)


def _member(record: Path, offset: int, tasks: Mapping[str, Task | str], form: GroupFormat) -> Member:
    attempt = read_attempt(text_at(record, offset))
    task = tasks[attempt.task_id]
    assert isinstance(task, Task)  # else the attempt has no score
    member = restored(attempt, plan_of(attempt, task, attempt.sandbox), form.tokenizer)
    assert isinstance(member, Member)
    return member


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
