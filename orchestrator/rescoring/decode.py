"""Makes lines of rollouts.jsonl ready to be scored again, in processes of their own (`decoders`).

Most of a line are ids and log-probs, and reading them is most of the work. What comes out is small: a rollout as a
grading process takes it, and its part of a line of the groups file, as JSON. Nothing here runs foreign code.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.errors import RecordError
from orchestrator.rules.text import told as told_text
from orchestrator.run.compared import plan_of
from orchestrator.run.groups import GroupFormat, entry, side_groups
from orchestrator.run.line import Attempted, CountedBadTask, read_attempt, read_counted, verdict_bytes
from orchestrator.run.lines import dumps
from orchestrator.scorers.processes import Ungraded, packed
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import (
    Attempt,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Group,
    Member,
    Record,
    RolloutPlan,
    Sampling,
    Score,
    Task,
    TokenSource,
    Trajectory,
)

_UNSCORED = Score(0.0)  # stands for the new score until that is known
LARGE = ("tokens", "masks", "inference_logprobs", "messages")  # columns of a group that are kept as JSON


@dataclass(frozen=True, slots=True)
class How:
    """What all lines of a run are read with. `form`: without its tokenizer, which has the name `tokenizer`.

    `scorer`: what the rollouts are packed for; None: they are scored elsewhere and not packed.
    """

    form: GroupFormat
    scorer: StrategyScorer | str | None
    tokenizer: str | None
    template_kwargs: Mapping[str, Any] | None = None
    here_only: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """A line, and what it is to be scored with. `task`: or why there is none. `superseded`: a later attempt took
    its place."""

    text: bytes
    task: Task | str
    superseded: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A rollout's part of a group's line, without its score. `entry`: the `LARGE` columns are JSON."""

    sampling: Sampling
    entry: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An attempt that was read. `told`: without what happened in it.

    `end`: how it ended, if it can be scored; a failure: why it cannot although it ended; None: it did not end.
    `verdict_bytes`: where the unchanging part of its line begins; None: the line is to be written anew.
    `packed`: for a grading process; None: it is to be scored elsewhere. `lines`: the main one and the side lines.
    """

    told: Attempted
    end: Ended | Failed | None
    verdict_bytes: int | None = None
    packed: bytes | None = None
    lines: tuple[Line, ...] = ()
    token_source: TokenSource | None = None
    segment: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no attempt and no bad task, and why."""

    reason: str


def decode(how: How, batch: Sequence[Asked]) -> list[Decoded | CountedBadTask | Unreadable]:
    """What the lines hold, in their order. Raises EnvironmentUnusable without the tokenizer."""
    form = replace(how.form, tokenizer=_tokenizer(how))
    return [_decoded(asked, form, how.scorer) for asked in batch]


def end_of(told: Attempted) -> Ended | None:
    """How the attempt ended, if it ended in a way that is scored, whether it got a score then or not.

    A run that is stopped while it grades leaves `ungraded`. Of a rollout that broke the scorer only those with an
    answer are known to have `finished`.
    """
    outcome = told.outcome
    if isinstance(outcome, Ended):
        return outcome
    if told.ungraded is not None:
        return told.ungraded
    finished = outcome.name is FailedName.SCORER_ERROR and told.record.answer is not None
    return Ended(EndedName.FINISHED) if finished else None


def _decoded(
    asked: Asked, form: GroupFormat, scorer: StrategyScorer | str | None
) -> Decoded | CountedBadTask | Unreadable:
    try:
        whole = read_attempt(asked.text)
    except ValueError as error:
        return _bad_task(asked.text) or Unreadable(str(error))
    told = replace(whole, record=Record(whole.record.started_at, answer=whole.record.answer))
    end = end_of(whole)
    if end is None or (whole.score is None and asked.superseded):
        return Decoded(told, None)
    size = verdict_bytes(asked.text, whole)
    if isinstance(asked.task, str):
        return Decoded(told, Failed(FailedName.SCORER_ERROR, asked.task), size)
    plan = plan_of(whole, asked.task, whole.sandbox)
    try:
        main = _main_line(plan, whole, form.tokenizer)
    except RecordError as error:
        return Decoded(told, Failed(FailedName.RECORD_ERROR, str(error)), size)
    member = Member(Attempt(plan, whole.record, end), main, _UNSCORED)
    try:
        rollout = None if scorer is None else packed(scorer, plan, whole.record, end)
    except Ungraded as error:
        return Decoded(told, Failed(FailedName.SCORER_ERROR, str(error)), size)
    fresh_note = "" if main.note in whole.record.notes else main.note
    return Decoded(told, end, size, rollout, _lines(member, form), main.token_source, main.segment, fresh_note)


def _bad_task(text: bytes) -> CountedBadTask | None:
    try:
        told = read_counted(text)
    except ValueError:
        return None
    return told if isinstance(told, CountedBadTask) else None


def _main_line(plan: RolloutPlan, told: Attempted, tokenizer: Tokenizer | None) -> Trajectory:
    """The line that the run trained on, if it says which. Raises RecordError, whatever goes wrong."""
    try:
        return main_line(plan, told.record, tokenizer, told.segment)
    except RecordError:
        raise
    except Exception as error:  # a template is a program, and a record may hold anything
        raise RecordError(f"no trajectory can be made of it: {told_text(error)}") from error


def _lines(member: Member, form: GroupFormat) -> tuple[Line, ...]:
    plan = member.attempt.plan
    sides = []
    if form.all_segments:
        alone = Group(plan.group, plan.task, (member,), (member.attempt,))
        sides = [side.members_G[0] for side in side_groups(alone, form.tokenizer)]
    return tuple(
        Line(plan.sampling, _as_json(entry(one, form, member.trajectory.segment))) for one in (member, *sides)
    )


def _as_json(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dumps(value) if name in LARGE and value is not None else value for name, value in columns.items()
    }


def _tokenizer(how: How) -> Tokenizer | None:
    if how.tokenizer is None:
        return None
    kwargs = how.template_kwargs
    return _loaded(how.tokenizer, None if kwargs is None else dumps(kwargs), how.here_only)


@functools.cache
def _loaded(name: str, template_kwargs: bytes | None, here_only: bool) -> Tokenizer:
    kwargs = None if template_kwargs is None else orjson.loads(template_kwargs)
    return load_tokenizer(name, kwargs, here_only=here_only)
