"""Scores a record again: lines in, the same lines with other scores out, in their order.

    lines ── batches ──► read strictly ── rollouts ──► grading processes ──► scores ──► lines of the new record

A rollout that gets no score in a batch is scored alone, as in a run, where a control decides whose fault it is. If
the scorer is a judge, all are scored alone. Lines are read in this process, within the limits of `run.lines`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.engine.health import HealthGate
from orchestrator.errors import RecordError, ScorerError
from orchestrator.rules.text import error_line as error_text
from orchestrator.rules.waits import first_error
from orchestrator.run.excerpts import Counted, CountedBadTask, read_counted
from orchestrator.run.line import RecordedAttempt, read_attempt, recorded_line
from orchestrator.run.lines import TextLine, dumps
from orchestrator.run.replay import plan_of
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.scorers.processes import Ungraded, packed
from orchestrator.types import Ended, EndedName, Failed, FailedName, RolloutPlan, Score, Task, Trajectory

BATCH_LINES = 64
BATCH_BYTES = 1 << 20
BATCHES = 4  # under way: some are graded while the next one is read
SCORED_ALONE = 16  # at a time: a judge's requests


@dataclass(frozen=True, slots=True)
class Rescored:
    """An attempt. `text`: its line in the new record."""

    rollout_id: str
    place: str
    text: bytes
    before: RecordedAttempt
    after: RecordedAttempt


@dataclass(frozen=True, slots=True)
class Copied:
    """A bad task's line."""

    rollout_id: str
    place: str
    text: bytes


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A line that cannot be used, and why."""

    place: str
    size_bytes: int
    reason: str


Result = Rescored | Copied | LeftOut


@dataclass(slots=True)
class Overview:
    """What a record holds. `latest`: the last attempt of each place, by group and index."""

    lines: int = 0
    tasks: set[str] = field(default_factory=set)
    latest: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[TextLine]) -> Overview:
        """Reads all lines. Raises OSError."""
        overview = cls()
        for line in lines:
            overview.lines += 1
            with suppress(ValueError):  # named when the line is to be scored
                head = read_counted(line.text)
                if isinstance(head, Counted):
                    overview.tasks.add(head.task_id)
                    place = head.group, head.index
                    overview.latest[place] = max(head.attempt, overview.latest.get(place, 0))
        return overview


@dataclass(frozen=True, slots=True)
class _Scorable:
    """An attempt to score. `after`: as it is recorded with its score, which is still missing there.

    `packed`: for a grading process; None: it is scored in this process.
    """

    place: str
    before: RecordedAttempt
    after: RecordedAttempt
    plan: RolloutPlan
    end: Ended
    packed: bytes | None


@dataclass(eq=False, slots=True)
class Rescorer:
    """`tasks`: by id, or why there is none; for all others the reason is `missing`. `tokenizer`: makes ids where
    the record has none. `health`: counts what was scored."""

    scorer: Scorer
    tokenizer: Tokenizer | None
    tasks: Mapping[str, Task | str]
    missing: str
    overview: Overview
    health: HealthGate
    _alone: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SCORED_ALONE))
    _ids: set[str] = field(default_factory=set)  # of the lines so far

    @property
    def _batches(self) -> ControlledScorer | None:
        return self.scorer if isinstance(self.scorer, ControlledScorer) else None

    async def run(self, lines: Iterable[TextLine], take: Callable[[list[Result]], Awaitable[None]]) -> None:
        """Gives the results to `take`, in the order of the lines. Raises what `take` raises, and RunUnhealthy if
        the scorer breaks on nearly all rollouts."""
        batches, under_way = _batches(lines), deque[asyncio.Task[list[Result]]]()
        try:
            async with asyncio.TaskGroup() as tg:
                while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                    under_way.append(tg.create_task(self._batch(batch)))
                    if len(under_way) == BATCHES:
                        await take(self._each_once(await under_way.popleft()))
                while under_way:
                    await take(self._each_once(await under_way.popleft()))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    def _each_once(self, results: Iterable[Result]) -> list[Result]:
        """The results; a line whose id an earlier one has is left out."""
        unique: list[Result] = []
        for result in results:
            if not isinstance(result, LeftOut):
                if result.rollout_id in self._ids:
                    reason = f"{result.rollout_id} is there a second time"
                    result = LeftOut(result.place, len(result.text), reason)
                else:
                    self._ids.add(result.rollout_id)
            unique.append(result)
        return unique

    async def _batch(self, lines: Sequence[TextLine]) -> list[Result]:
        rollouts = await asyncio.to_thread(lambda: list(map(self._read, lines)))
        scores: dict[int, Score | None] = {}
        if self._batches is not None:
            texts = {n: one.packed for n, one in enumerate(rollouts) if isinstance(one, _Scorable) and one.packed}
            scores = dict(zip(texts, await self._batches.score_batch(list(texts.values())), strict=True))
        return await asyncio.gather(
            *(self._result(rollout, scores.get(number)) for number, rollout in enumerate(rollouts))
        )

    def _read(self, line: TextLine) -> _Scorable | Result:
        """The attempt of a line, to be scored; or what is known of it without a score."""
        text = line.text.rstrip(b"\r\n") + b"\n"
        try:
            before = read_attempt(line.text)
        except ValueError as error:
            bad_task = _bad_task(line.text)
            if bad_task is None:
                return LeftOut(line.place, len(line.text), str(error))
            return Copied(bad_task.rollout_id, line.place, text)
        end = end_of(before)
        superseded = before.attempt < self.overview.latest.get((before.group, before.index), 0)
        if end is None or (before.score is None and superseded):
            return Rescored(before.rollout_id, line.place, text, before, before)
        task = self.tasks.get(before.task_id, self.missing)
        if isinstance(task, str):
            return _rescored(line.place, before, before, Failed(FailedName.SCORER_ERROR, task))
        plan = plan_of(before, task, before.sandbox)
        try:
            main = _main_line(plan, before, self.tokenizer)
            rollout = packed(self._batches.grades_with, plan, before.record, end) if self._batches else None
        except RecordError as error:
            return _rescored(line.place, before, before, Failed(FailedName.RECORD_ERROR, str(error)))
        except Ungraded as error:
            return _rescored(line.place, before, before, Failed(FailedName.SCORER_ERROR, str(error)))
        record = before.record
        if main.note and main.note not in record.notes:
            record = replace(record, notes=(*record.notes, main.note))
        after = replace(
            before,
            record=record,
            reference=task.reference,
            outcome=end,
            ungraded=None,
            token_source=main.token_source,
            segment=main.segment,
        )
        return _Scorable(line.place, before, after, plan, end, rollout)

    async def _result(self, rollout: _Scorable | Result, score: Score | None) -> Result:
        if not isinstance(rollout, _Scorable):
            return rollout
        verdict = score or await self._scored_alone(rollout)
        self.health.count(rollout.plan.group, verdict if isinstance(verdict, Failed) else None)
        return _rescored(rollout.place, rollout.before, rollout.after, verdict)

    async def _scored_alone(self, rollout: _Scorable) -> Score | Failed:
        async with self._alone:
            try:
                return await self.scorer.score(rollout.plan, rollout.before.record, rollout.end)
            except ScorerError as error:
                return Failed(FailedName.SCORER_ERROR, str(error))


def end_of(attempt: RecordedAttempt) -> Ended | None:
    """How the attempt ended, if it ended in a way that is scored, whether it got a score then or not.

    A run that is stopped while it grades leaves `ungraded`. Of a rollout that broke the scorer only those with an
    answer are known to have `finished`.
    """
    outcome = attempt.outcome
    if isinstance(outcome, Ended):
        return outcome
    if attempt.ungraded is not None:
        return attempt.ungraded
    finished = outcome.name is FailedName.SCORER_ERROR and attempt.record.answer is not None
    return Ended(EndedName.FINISHED) if finished else None


def _rescored(place: str, before: RecordedAttempt, after: RecordedAttempt, verdict: Score | Failed) -> Rescored:
    if isinstance(verdict, Failed):
        after = replace(after, outcome=verdict, ungraded=None, score=None, token_source=None, segment=None)
    else:
        after = replace(after, score=verdict)
    return Rescored(before.rollout_id, place, dumps(recorded_line(after)) + b"\n", before, after)


def _bad_task(text: bytes) -> CountedBadTask | None:
    with suppress(ValueError):
        if isinstance(head := read_counted(text), CountedBadTask):
            return head
    return None


def _main_line(plan: RolloutPlan, attempt: RecordedAttempt, tokenizer: Tokenizer | None) -> Trajectory:
    """The line that the run trained on, if it says which. Raises RecordError, whatever goes wrong."""
    try:
        return main_line(plan, attempt.record, tokenizer, attempt.segment)
    except RecordError:
        raise
    except Exception as error:  # a template is a program, and a record may hold anything
        raise RecordError(f"no trajectory can be made of it: {error_text(error)}") from error


def _batches(lines: Iterable[TextLine]) -> Iterator[list[TextLine]]:
    batch: list[TextLine] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line.text)
        if len(batch) >= BATCH_LINES or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
