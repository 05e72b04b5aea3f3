"""A group with branches: a trunk of three turns, branches at turns 2 and 3, and a whole rollout."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.completion.trajectory import trajectory
from orchestrator.types import (
    Branch,
    Completion,
    CompletionKind,
    Group,
    Member,
    Message,
    Record,
    Score,
    Task,
    Turn,
)
from orchestrator.types.prefix import branching
from tests.fakes.plans import TALK, an_attempt

TAG = "</code>"
TURNS, SCORES = 3, (0.0, 1.0, 0.0, 1.0)


def turn(number: int, rollout: int, talk: tuple[Message, ...]) -> Turn:
    """Ids that no other turn has: 100 * rollout + 10 * turn + place."""
    first = 100 * rollout + 10 * number
    said = Completion(
        f"r{rollout}t{number}{TAG}", f"r{rollout}t{number}", "stop", (first, first + 1), (-0.1, -0.2), 3, 2
    )
    said = replace(said, policy_version="7")
    return Turn(number, CompletionKind.ACTION, 0, talk, 0, (1, 2), "", said, 2.0 * number, 2.0 * number + 1)


def line(rollout: int, before: tuple[Turn, ...] = ()) -> tuple[Turn, ...]:
    turns, talk = list(before), list(TALK)
    for number in range(1, TURNS + 1):
        if number > len(before):
            turns.append(turn(number, rollout, tuple(talk)))
        talk += [Message("assistant", turns[number - 1].completion.visible + TAG), Message("user", str(number))]
    return tuple(turns)


def tree() -> Group:
    """A trunk, branches of it at turns 2 and 3, and a whole rollout."""
    trunk = Record(0.0, turns=line(1), answer="42")
    name = an_attempt(index=0).plan.rollout_id
    records = [trunk]
    for index, at in ((1, 2), (2, 3)):
        prefix = branching(name, trunk, at)
        assert prefix.branch == Branch(name, at)
        records.append(replace(trunk, turns=line(index + 1, prefix.turns), branch=prefix.branch))
    records.append(Record(0.0, turns=line(4), answer="42"))
    made = []
    for index, (record, score) in enumerate(zip(records, SCORES, strict=True)):
        attempt = replace(an_attempt(index=index), record=record)
        made.append(Member(attempt, trajectory(record, None, TAG), Score(score)))
    return Group(0, Task("task", "?", "42"), tuple(made), tuple(m.attempt for m in made))
