"""Rows: what a rollout is for a trainer, one row for each of its id lines. Pure.

The same rows come from a finished group, from one attempt, and from a line of rollouts.jsonl that was read back.
Ids, masks and log-probs are those of the rollout's line in the groups file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import (
    in_lines,
    main_segment,
    sampled_by,
    sampled_tokens,
    side_lines,
    trajectory,
)
from orchestrator.errors import RecordError
from orchestrator.rules.plan import rollout_id
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import RecordedAttempt, recorded_attempt
from orchestrator.run.trees import InTree, in_trees, own_from
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
    Record,
    Task,
    TokenSource,
    Tools,
    Trajectory,
    Turn,
    last_attempts,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One id line of one rollout. `env_mask` and `logprobs` are as long as `completion_ids`.

    `prompt_ids`: the line up to its first sampled token. `completion_ids`: the rest, sampled tokens and what came
    between them (observations, headers of turns). Both are empty if no ids are known.
    `env_mask`: 1 where this rollout's policy sampled the token and it is to be trained on. It is 0 everywhere if
    the rollout has no score, if its group was dropped, or if the run masks it (env.untrained_outcomes,
    env.train_mixed_versions, env.trained_segments).
    `logprobs`: natural log, raw model distribution; None where masked. None as a whole: the endpoint gives none.
    `score`: in [0, 1], the same in all rows of a rollout that are trained on. None: the rollout has no score and
    is compared with no other, or this is a side line that is not trained on.
    `weight`: what the row counts for where each row has a loss of its own, the mean over its tokens: its part of
    the rollout's trained tokens. The weights of a rollout's rows sum to 1, and their losses, so weighted, to the
    loss of one long line. 0: the row is not trained on.
    `policy_version`: the one that sampled last; `policy_versions`: all that sampled, in the order they came.
    `policy_spans`: which of them sampled which of this line's sampled tokens, in order.
    Versions are those of the whole rollout. None and empty if neither the endpoint nor a trainer names them.
    `main`: whether this is the rollout's main line, for trainers that take one line of a rollout. Every rollout
    has exactly one main row. The others are side lines: plans, managed agents, rewritten histories, what a program
    asked aside. env.trained_segments says whether they are trained on; by default a program's are.
    `tools`: what the line's last prompt offers, in the form of OpenAI's chat completions.
    `reason`: of the outcome, or why a line has no ids; may be empty.
    `dropped`: why the rollout's group is no training data. None: it is, or the row was read from a record.
    `parent`, `turn`: the rollout from which this one branched, and the first turn that it sampled itself; what it
    inherited is masked here and stands in the parent's row. None: it did not branch. `advantages`: of a group with
    branches, for each of `completion_ids`, beside its siblings (docs/branching.md), 0 where masked.
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
    weight: float = 1.0
    token_source: TokenSource = "none"
    finish_reason: str | None = None
    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    reason: str = ""
    dropped: str | None = None
    parent: str | None = None
    turn: int | None = None
    advantages: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.env_mask)}
        lengths |= {len(values) for values in (self.logprobs, self.advantages) if values is not None}
        if len(lengths) != 1:
            raise ValueError(f"completion, mask and log-probs differ in length: {sorted(lengths)}")


def group_rows(group: Group, form: GroupFormat) -> list[Row]:
    """Rows of all rollouts of a group, in the order of their places; complete or dropped, with or without a score.

    Of a place where no rollout succeeded, the row is that of its last attempt.
    """
    members = {member.attempt.plan.index: member for member in group.members_G}
    results: dict[int, Member | Attempt] = {a.plan.index: a for a in last_attempts(group.attempts)}
    results |= members
    trees = in_trees(group.members_G)
    return [
        row
        for index, result in sorted(results.items())
        for row in result_rows(result, form, group.dropped, trees.get(_id(result)))
    ]


def _id(result: Member | Attempt) -> str:
    return (result.attempt if isinstance(result, Member) else result).plan.rollout_id


def result_rows(
    result: Member | Attempt, form: GroupFormat, dropped: str | None = None, place: InTree | None = None
) -> list[Row]:
    """Rows of one rollout, the main row first. `dropped`: why its group is no training data. `place`: in its
    group's trees."""
    attempt = result.attempt if isinstance(result, Member) else result
    line = result.trajectory if isinstance(result, Member) else None
    return recorded_rows(
        recorded_attempt(result),
        form,
        line=line,
        question=attempt.plan.task.question,
        dropped=dropped,
        place=place,
    )


def recorded_rows(
    attempt: RecordedAttempt,
    form: GroupFormat,
    *,
    line: Trajectory | None = None,
    question: str = "",
    dropped: str | None = None,
    place: InTree | None = None,
) -> list[Row]:
    """Rows of one attempt on record, the main row first. `line`: the main line, if it was made already. `place`:
    in its group's trees.

    `question`: of the task. It finds the main line of an attempt without a score; the record of a scored one names
    it. Without a tokenizer in `form`, lines of an endpoint that takes no ids have none.
    """
    turns = attempt.record.turns
    # A record that does not add up has no line, and making one may fail in any way.
    broken = isinstance(attempt.outcome, Failed) and attempt.outcome.name is FailedName.RECORD_ERROR
    if not turns or broken:
        return [_bare(attempt, dropped)]
    main = main_segment(turns, question, attempt.agent.main_line) if attempt.segment is None else attempt.segment
    if place is not None and form.trunk_masked:
        line, attempt = None, replace(attempt, record=own_from(attempt.record, place.last_fork))
    lines = {main: line or _line(attempt, form.tokenizer, main)}
    if attempt.score is not None:
        lines |= side_lines(attempt.record, form.tokenizer, attempt.agent.closing_tag, main)
    trained = lines if form.trains_sides(attempt.agent.kind) else (main,)
    learns = attempt.score is not None and dropped is None and form.trains(attempt.outcome, attempt.record)
    weights = _weights(attempt.record, {segment: lines[segment] for segment in trained})
    last = {turn.segment: turn for turn, _ in in_lines(turns)}
    rows = []
    for segment, made in lines.items():
        row = replace(_bare(attempt, dropped, segment), main=segment == main, weight=weights.get(segment, 0.0))
        row = row if segment in weights else replace(row, score=None)
        # A line that there is not, as a record that was changed may name it, has no last turn and no ids.
        turn = last.get(segment, turns[-1])
        row = _filled(row, attempt.record, turn, made, learns=learns and segment in weights)
        if place is not None and isinstance(made, Trajectory):
            values = place.advantages(attempt.record, made, form.tokenizer, attempt.agent.closing_tag)
            own = zip(values[len(row.prompt_ids) :], row.env_mask, strict=True)
            row = replace(row, advantages=tuple(value * on for value, on in own))
        rows.append(row)
    return rows


def bad_task_row(task: BadTask, number: int, index: int = 0) -> Row:
    """A row of a task that cannot be rolled out. All its rows have the id of its line on record. `number`: its
    place in the stream of tasks; `index`: a place in the group that is not there."""
    return Row(f"g{number:06d}", task.task_id, number, index, str(FailedName.BAD_TASK), None, reason=task.reason)


def unfinished_row(task: Task, number: int, index: int) -> Row:
    """A row of a group that did not end, as the run was stopped. What did happen is on record."""
    name, reason = str(FailedName.CANCELLED), "the run was stopped before the group ended"
    return Row(rollout_id(number, index, 0), task.task_id, number, index, name, None, reason=reason)


def _bare(attempt: RecordedAttempt, dropped: str | None, segment: int = 0) -> Row:
    """The main row, without ids."""
    outcome = attempt.outcome
    return Row(
        rollout_id=attempt.rollout_id,
        task_id=attempt.task_id,
        group=attempt.group,
        index=attempt.index,
        outcome=str(outcome.name),
        score=None if attempt.score is None else attempt.score.value,
        segment=segment,
        reason=outcome.detail if isinstance(outcome, Ended) else outcome.reason,
        dropped=dropped,
        parent=attempt.record.fork.parent if attempt.record.fork else None,
        turn=attempt.record.fork.turn if attempt.record.fork else None,
    )


def _line(attempt: RecordedAttempt, tokenizer: Tokenizer | None, segment: int) -> Trajectory | RecordError:
    try:
        return trajectory(attempt.record, tokenizer, attempt.agent.closing_tag, segment)
    except RecordError as error:
        return error


def _weights(record: Record, lines: Mapping[int, Trajectory | RecordError]) -> dict[int, float]:
    """What each of a rollout's lines counts for: its part of the trained tokens of all. Where there is no token
    the first counts for all."""
    sampled = sampled_tokens(record.turns)  # of lines without ids
    tokens = {
        segment: 0 if isinstance(line, RecordError) else sum(line.trained_T) if line.tokens_T else sampled[segment]
        for segment, line in lines.items()
    }
    if not any(tokens.values()):
        return {segment: float(not at) for at, segment in enumerate(tokens)}
    return {segment: count / sum(tokens.values()) for segment, count in tokens.items()}


def _filled(row: Row, record: Record, last: Turn, line: Trajectory | RecordError, *, learns: bool) -> Row:
    """The row with the ids of its line, or with the reason why there are none. `last`: the line's last turn."""
    if isinstance(line, RecordError):
        return replace(row, reason=str(line))
    first = line.trained_T.index(True) if True in line.trained_T else len(line.tokens_T)
    mask = [int(sampled and learns) for sampled in line.trained_T[first:]]
    logprobs = None
    if line.logprobs_T is not None:
        logprobs = tuple(p if m else None for p, m in zip(line.logprobs_T[first:], mask, strict=True))
    return replace(
        row,
        prompt_ids=line.tokens_T[:first],
        completion_ids=line.tokens_T[first:],
        env_mask=tuple(mask),
        logprobs=logprobs,
        policy_version=record.policy_version,
        policy_versions=record.policy_versions,
        policy_spans=sampled_by(record, line),
        token_source=line.token_source,
        finish_reason=last.completion.finish_reason,
        messages=line.messages,
        tools=last.tools,
    )
