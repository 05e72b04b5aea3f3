"""Excerpts of the lines of a run's files, read in a fraction of the time that a whole attempt takes.

What is counted of an attempt and of a written group; what is played again; what was asked of the outside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from orchestrator.run.line import OF_PLAN, present, score_of, turn_of
from orchestrator.run.schema import BadTaskLine, HeadLine, Real, ServedLine, Whole, read_line
from orchestrator.types import (
    Attempt,
    Branch,
    CompletionKind,
    Continued,
    Crossing,
    Ended,
    Member,
    Score,
    Turn,
    count_crossings,
)


class _Tokens(TypedDict):
    prompt_tokens: Whole
    completion_tokens: Whole
    inherited: NotRequired[bool]


class _CountedRequest(TypedDict):
    refusal: NotRequired[str]
    source: NotRequired[str]


class _CountedLine(HeadLine):
    completions: tuple[_Tokens, ...]
    crossings: NotRequired[tuple[_CountedRequest, ...]]
    continued: NotRequired[tuple[Continued, ...]]
    refused_requests: NotRequired[tuple[str, ...]]
    branch: NotRequired[Branch]


class _CrossingsLine(TypedDict):
    rollout_id: str
    task_id: str
    crossings: NotRequired[tuple[Crossing, ...]]


class _CallLine(ServedLine):
    sequence: NotRequired[Whole]


# What a recording may lack of a completion's line.
_NO_TURN: Any = {"kind": CompletionKind.ACTION, "closing": "", "started_s": 0.0, "ended_s": 0.0, "retries": 0}


class _EpisodeLine(TypedDict):
    task_id: str
    index: Whole
    rollout_id: NotRequired[str]
    score: Real
    completions: tuple[_CallLine, ...]


class _UnscoredLine(TypedDict):
    score: NotRequired[None]


class _GroupFacts(TypedDict):
    rollout_id: str
    completion_tokens: NotRequired[Whole]
    untrained_share: NotRequired[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]]


class _GroupHeadLine(TypedDict):
    overrides: tuple[_GroupFacts, ...]
    scores: tuple[Real, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The counted facts of an attempt. `score` None: it was not scored, so it may be drawn again.
    `crossing_counts`: as `count_crossings` counts."""

    rollout_id: str
    task_id: str
    group: int
    index: int
    attempt: int
    outcome: str
    reason: str
    ungraded: bool
    score: Score | None
    prompt_tokens: int
    sampled_tokens: int
    duration_s: float
    cpu_s: float | None
    group_size: int | None = None
    refusals: tuple[str, ...] = ()
    continued: tuple[Continued, ...] = ()
    branch: Branch | None = None
    crossing_counts: Counter[str] = field(default_factory=Counter)

    @property
    def begun(self) -> int:
        """The first turn of its own, from 1 on."""
        return self.branch.turn if self.branch else 1

    @classmethod
    def of(cls, result: Member | Attempt) -> Counted:
        """The same facts as in its line."""
        attempt = result.attempt if isinstance(result, Member) else result
        plan, record, outcome = attempt.plan, attempt.record, attempt.outcome
        return cls(
            **{name: getattr(plan, name) for name in (*OF_PLAN, "group_size")},
            task_id=plan.task.task_id,
            outcome=str(outcome.name),
            reason=outcome.detail if isinstance(outcome, Ended) else outcome.reason,
            ungraded=attempt.ungraded is not None,
            score=result.score if isinstance(result, Member) else None,
            prompt_tokens=record.prompt_tokens,
            sampled_tokens=record.sampled_tokens,
            duration_s=record.duration_s,
            cpu_s=record.cpu_s,
            refusals=record.requests.refusals,
            continued=record.continued,
            branch=record.branch,
            crossing_counts=record.crossing_counts,
        )


@dataclass(frozen=True, slots=True)
class CountedBadTask:
    """A row that no task could be made of. `rollout_id` holds only the group's number."""

    rollout_id: str
    task_id: str
    reason: str


def read_counted(text: bytes) -> Counted | CountedBadTask:
    """The counted facts of a line of rollouts.jsonl, in a fraction of `read_attempt`'s time. Raises ValueError."""
    value = read_line(_HEAD, text)
    if "index" not in value:
        return CountedBadTask(value["rollout_id"], value["task_id"], value["reason"])
    line: _CountedLine = value
    own = [completion for completion in line["completions"] if not completion.get("inherited")]
    return Counted(
        **present(line, (*OF_PLAN, "task_id", "reason", "duration_s", "cpu_s", "group_size", "continued")),
        outcome=str(line["outcome"]),
        ungraded=line.get("ungraded") is not None,
        score=score_of(line),
        prompt_tokens=sum(completion["prompt_tokens"] for completion in own),
        sampled_tokens=sum(completion["completion_tokens"] for completion in own),
        refusals=line.get("refused_requests", ()),
        branch=line.get("branch"),
        crossing_counts=count_crossings(
            (one.get("refusal"), one.get("source")) for one in line.get("crossings", ())
        ),
    )


@dataclass(frozen=True, slots=True)
class Episode:
    """The completions of a scored attempt; of a recording with fewer fields than an attempt's line, the others are
    empty. `rollout_id` None: the recording was merged from several runs."""

    task_id: str
    index: int
    rollout_id: str | None
    turns: tuple[Turn, ...]


def read_episode(text: bytes) -> Episode | None:
    """A line of rollouts.jsonl, or of a recording with fewer fields. None: it is not scored. Raises ValueError."""
    value = read_line(_EPISODE, text)
    if value.get("score") is None:
        return None
    line: _EpisodeLine = value
    completions: list[Any] = [
        {**_NO_TURN, "sequence": number, **dict(completion)}
        for number, completion in enumerate(line["completions"], 1)
    ]
    turns = tuple(turn_of(completion, ()) for completion in completions)
    return Episode(line["task_id"], line["index"], line.get("rollout_id"), turns)


def read_crossings(text: bytes) -> tuple[str, str, tuple[Crossing, ...]]:
    """(rollout id, task id, what it asked of the outside) of a line of rollouts.jsonl. Raises ValueError."""
    line: _CrossingsLine = read_line(_CROSSINGS, text)
    return line["rollout_id"], line["task_id"], line.get("crossings", ())


@dataclass(frozen=True, slots=True)
class WrittenGroup:
    """A line of a groups file, as far as it is counted. `sampled`, `untrained`: tokens of its rollouts, and those
    of them that are in no line of the file."""

    rollout_ids: tuple[str, ...]
    scores: tuple[float, ...]
    sampled: int = 0
    untrained: int = 0


def read_written_group(text: bytes) -> WrittenGroup:
    """The counted facts of a line of a groups file. Raises ValueError."""
    line: _GroupHeadLine = read_line(_GROUP_HEAD, text)
    members = line["overrides"]
    sampled = [facts.get("completion_tokens", 0) for facts in members]
    untrained = [round(n * facts.get("untrained_share", 0.0)) for n, facts in zip(sampled, members, strict=True)]
    ids = tuple(facts["rollout_id"] for facts in members)
    return WrittenGroup(ids, line["scores"], sum(sampled), sum(untrained))


_CROSSINGS: TypeAdapter[_CrossingsLine] = TypeAdapter(_CrossingsLine)
_HEAD: TypeAdapter[Any] = TypeAdapter(_CountedLine | BadTaskLine)
_EPISODE: TypeAdapter[Any] = TypeAdapter(_EpisodeLine | _UnscoredLine)
_GROUP_HEAD: TypeAdapter[_GroupHeadLine] = TypeAdapter(_GroupHeadLine)
