"""Rows: what a rollout is for a trainer, one row for each of its id lines. Pure.

The same rows come from a finished group, from one attempt, and from a line of rollouts.jsonl that was read back.
Ids, masks and log-probs are those of the rollout's line in the groups file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_segment, sampled_by, trajectory
from orchestrator.errors import RecordError
from orchestrator.plan import rollout_id
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import Attempted, told_of
from orchestrator.types import (
    Attempt,
    BadTask,
    Ended,
    Failed,
    FailedName,
    Group,
    Member,
    Message,
    PolicySpan,
    Task,
    TokenSource,
    Tools,
    Trajectory,
    last_attempts,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One id line of one rollout. `env_mask` and `logprobs` are as long as `completion_ids`.

    `prompt_ids`: the line up to its first sampled token. `completion_ids`: the rest, sampled tokens and what came
    between them (observations, headers of turns). Both are empty if no ids are known.
    `env_mask`: 1 where this rollout's policy sampled the token and it may be trained on. It is 0 everywhere if the
    rollout has no score, if its group was dropped, or if the run masks it (env.untrained_outcomes,
    env.train_mixed_versions).
    `logprobs`: natural log, raw model distribution; None where masked. None as a whole: the endpoint gives none.
    `score`: in [0, 1]. None: the rollout has no score and is compared with no other, or this is no main row.
    `policy_version`: the one that sampled last; `policy_versions`: all that sampled, in the order they came.
    `policy_spans`: which of them sampled which of this line's sampled tokens, in order.
    Versions are those of the whole rollout. None and empty if neither the endpoint nor a trainer names them.
    `main`: whether this is the rollout's main line. Every rollout has exactly one main row. The others are side
    lines: plans, managed agents, rewritten histories. They have no score of their own: who trains on them gives
    them what the main row of the same `rollout_id` gets; who does not leaves them out. env.trained_segments says
    which of the two the run wants.
    `tools`: what the line's last prompt offers, in the form of OpenAI's chat completions.
    `reason`: of the outcome, or why a line has no ids; may be empty.
    `dropped`: why the rollout's group is no training data. None: it is, or the row was read from a record.
    `finish_reason`: of the line's last completion; `length`: it was cut. None: there is no completion.
    """

    rollout_id: str
    task_id: str
    group: int
    index: int
    outcome: str
    score: float | None
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    env_mask: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    policy_version: str | None = None
    policy_versions: tuple[str, ...] = ()
    policy_spans: tuple[PolicySpan, ...] = ()
    segment: int = 0
    main: bool = True
    token_source: TokenSource = "none"
    finish_reason: str | None = None
    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    reason: str = ""
    dropped: str | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.env_mask)}
        if self.logprobs is not None:
            lengths.add(len(self.logprobs))
        if len(lengths) != 1:
            raise ValueError(f"completion, mask and log-probs differ in length: {sorted(lengths)}")


def group_rows(group: Group, form: GroupFormat) -> list[Row]:
    """Rows of all rollouts of a group, in the order of their places; complete or dropped, with or without a score.

    Of a place where no rollout succeeded, the row is that of its last attempt.
    """
    members = {member.attempt.plan.index: member for member in group.members_G}
    results: dict[int, Member | Attempt] = {a.plan.index: a for a in last_attempts(group.attempts)}
    results |= members
    return [row for index in sorted(results) for row in result_rows(results[index], form, group.dropped)]


def result_rows(result: Member | Attempt, form: GroupFormat, dropped: str | None = None) -> list[Row]:
    """Rows of one rollout, the main row first. `dropped`: why its group is no training data."""
    attempt = result.attempt if isinstance(result, Member) else result
    line = result.trajectory if isinstance(result, Member) else None
    return told_rows(told_of(result), form, line=line, question=attempt.plan.task.question, dropped=dropped)


def told_rows(
    told: Attempted,
    form: GroupFormat,
    *,
    line: Trajectory | None = None,
    question: str = "",
    dropped: str | None = None,
) -> list[Row]:
    """Rows of one attempt on record, the main row first. `line`: the main line, if it was made already.

    `question`: of the task. It finds the main line of an attempt without a score; the record of a scored one names
    it. Without a tokenizer in `form`, lines of an endpoint that takes no ids have none.
    """
    turns = told.record.turns
    # A record that does not add up has no line, and making one may fail in any way.
    broken = isinstance(told.outcome, Failed) and told.outcome.name is FailedName.RECORD_ERROR
    if not turns or broken:
        return [_bare(told, dropped)]
    main = main_segment(turns, question) if told.segment is None else told.segment
    sides = sorted({turn.segment for turn in turns} - {main}) if told.score is not None else []
    trained = told.score is not None and dropped is None and form.trains(told.outcome, told.record)
    rows = [_filled(_bare(told, dropped, main), told, form.tokenizer, trained, line)]
    for segment in sides:
        side = replace(_bare(told, dropped, segment), main=False, score=None)
        rows.append(_filled(side, told, form.tokenizer, trained))
    return rows


def bad_task_row(task: BadTask, number: int, index: int = 0) -> Row:
    """A row of a task that cannot be rolled out. All its rows have the id of its line on record. `number`: its
    place in the stream of tasks; `index`: a place in the group that is not there."""
    return Row(f"g{number:06d}", task.task_id, number, index, str(FailedName.BAD_TASK), None, reason=task.reason)


def unfinished_row(task: Task, number: int, index: int) -> Row:
    """A row of a group that did not end, as the run was stopped. What did happen is on record."""
    name, reason = str(FailedName.CANCELLED), "the run was stopped before the group ended"
    return Row(rollout_id(number, index, 0), task.task_id, number, index, name, None, reason=reason)


def _bare(told: Attempted, dropped: str | None, segment: int = 0) -> Row:
    """The main row, without ids."""
    outcome = told.outcome
    return Row(
        rollout_id=told.rollout_id,
        task_id=told.task_id,
        group=told.group,
        index=told.index,
        outcome=str(outcome.name),
        score=None if told.score is None else told.score.value,
        segment=segment,
        reason=outcome.detail if isinstance(outcome, Ended) else outcome.reason,
        dropped=dropped,
    )


def _filled(
    row: Row, told: Attempted, tokenizer: Tokenizer | None, trained: bool, line: Trajectory | None = None
) -> Row:
    """The row with the ids of its segment, or with the reason why there are none."""
    try:
        line = line or trajectory(told.record, tokenizer, told.agent.closing_tag, row.segment)
    except RecordError as error:
        return replace(row, reason=str(error))
    first = line.trained_T.index(True) if True in line.trained_T else len(line.tokens_T)
    mask = [int(sampled and trained) for sampled in line.trained_T[first:]]
    logprobs = None
    if line.logprobs_T is not None:
        logprobs = tuple(p if m else None for p, m in zip(line.logprobs_T[first:], mask, strict=True))
    last = [turn for turn in told.record.turns if turn.segment == row.segment][-1]
    return replace(
        row,
        prompt_ids=line.tokens_T[:first],
        completion_ids=line.tokens_T[first:],
        env_mask=tuple(mask),
        logprobs=logprobs,
        policy_version=told.record.policy_version,
        policy_versions=told.record.policy_versions,
        policy_spans=sampled_by(told.record, line),
        token_source=line.token_source,
        finish_reason=last.completion.finish_reason,
        messages=line.messages,
        tools=last.tools,
    )
