"""Scores a record again: lines in, the same lines with other scores out, in their order.

    lines ── batches ──► decoders (processes) ── packed rollouts ──► grading processes ──► scores
                                │                                                            │
                                └── parts of the groups' lines ──► grouping ◄────────────────┘

A rollout that gets no score in a batch is scored alone, as in a run, where a control decides whose fault it is. If
the scorer is a judge, all are scored alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.engine.health import HealthGate
from orchestrator.errors import ScorerError
from orchestrator.rescoring.decode import Asked, Decoded, Line, Unreadable
from orchestrator.rescoring.decoders import Decoders
from orchestrator.rescoring.glance import Overview, glance
from orchestrator.rules.waits import first_error
from orchestrator.run.compared import plan_of
from orchestrator.run.line import Attempted, CountedBadTask, read_attempt, told_line, verdict_line
from orchestrator.run.lines import TextLine, dumps
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.types import Ended, Failed, FailedName, Score, Task

BATCH_LINES = 64
BATCH_BYTES = 1 << 20
SCORED_ALONE = 16  # at a time: a judge's requests


@dataclass(frozen=True, slots=True)
class Rescored:
    """An attempt. `text`: its line in the new record. `before`, `after`: without what happened in the attempt.

    `lines`: its parts of groups' lines; empty if it has no score now.
    """

    rollout_id: str
    place: str
    text: bytes
    before: Attempted
    after: Attempted
    lines: tuple[Line, ...] = ()


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


class Rescorer:
    """`tasks`: by id, or why there is none; for the others `missing` says it. `health`: counts what was scored."""

    def __init__(
        self,
        scorer: Scorer,
        decoders: Decoders,
        tasks: Mapping[str, Task | str],
        missing: str,
        overview: Overview,
        health: HealthGate,
    ) -> None:
        self._scorer = scorer
        self._health = health
        self._decoders = decoders
        self._tasks = tasks
        self._missing = missing
        self._overview = overview
        self._alone = asyncio.Semaphore(SCORED_ALONE)
        self._seen: set[str] = set()

    async def run(self, lines: Iterable[TextLine], take: Callable[[list[Result]], Awaitable[None]]) -> None:
        """Gives the results to `take`, in the order of the lines. Raises what `take` raises, and RunUnhealthy if
        the scorer breaks on nearly all rollouts."""
        try:
            await self._run(lines, take)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _run(self, lines: Iterable[TextLine], take: Callable[[list[Result]], Awaitable[None]]) -> None:
        batches = _batches(lines)
        under_way: deque[asyncio.Task[list[Result]]] = deque()
        async with asyncio.TaskGroup() as tg:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                under_way.append(tg.create_task(self._batch(batch)))
                if len(under_way) > 2 * self._decoders.processes:
                    await take(self._each_once(await under_way.popleft()))
            while under_way:
                await take(self._each_once(await under_way.popleft()))

    def _each_once(self, results: Iterable[Result]) -> list[Result]:
        """The results, without those whose id an earlier line has."""
        fresh: list[Result] = []
        for result in results:
            if isinstance(result, LeftOut):
                fresh.append(result)
            elif result.rollout_id in self._seen:
                fresh.append(
                    LeftOut(result.place, len(result.text), f"{result.rollout_id} is there a second time")
                )
            else:
                self._seen.add(result.rollout_id)
                fresh.append(result)
        return fresh

    async def _batch(self, lines: Sequence[TextLine]) -> list[Result]:
        asked = [self._asked(line.text) for line in lines]
        decoded = await self._decoders.decode(asked)
        scores: dict[int, Score | None] = {}
        if isinstance(self._scorer, ControlledScorer):
            packed = {n: one.packed for n, one in enumerate(decoded) if isinstance(one, Decoded) and one.packed}
            scores = dict(zip(packed, await self._scorer.score_batch(list(packed.values())), strict=True))
        each = enumerate(zip(lines, asked, decoded, strict=True))
        return await asyncio.gather(*(self._result(*one, scores.get(n)) for n, one in each))

    def _asked(self, text: bytes) -> Asked:
        whose = glance(text)
        if whose is None:
            return Asked(text, self._missing, superseded=False)
        return Asked(text, self._tasks.get(whose.task_id, self._missing), self._overview.is_superseded(whose))

    async def _result(
        self, line: TextLine, asked: Asked, decoded: Decoded | CountedBadTask | Unreadable, score: Score | None
    ) -> Result:
        if isinstance(decoded, Unreadable):
            return LeftOut(line.place, len(line.text), decoded.reason)
        text = line.text.rstrip(b"\r\n") + b"\n"
        if isinstance(decoded, CountedBadTask):
            return Copied(decoded.rollout_id, line.place, text)
        told, end = decoded.told, decoded.end
        if end is None:
            return Rescored(told.rollout_id, line.place, text, told, told)
        verdict = score or (end if isinstance(end, Failed) else await self._scored_alone(asked, end))
        if isinstance(end, Ended):
            self._health.count(told.group, verdict if isinstance(verdict, Failed) else None)
        if isinstance(verdict, Failed):
            after = replace(told, outcome=verdict, ungraded=None, score=None, token_source=None, segment=None)
            return Rescored(told.rollout_id, line.place, _written(text, after, decoded), told, after)
        assert isinstance(end, Ended)
        assert isinstance(asked.task, Task)  # without its task a rollout has no `Ended`
        after = replace(
            told,
            reference=asked.task.reference,
            outcome=end,
            ungraded=None,
            score=verdict,
            token_source=decoded.token_source,
            segment=decoded.segment,
        )
        return Rescored(told.rollout_id, line.place, _written(text, after, decoded), told, after, decoded.lines)

    async def _scored_alone(self, asked: Asked, end: Ended) -> Score | Failed:
        assert isinstance(asked.task, Task)
        async with self._alone:
            told = await asyncio.to_thread(read_attempt, asked.text)
            try:
                return await self._scorer.score(plan_of(told, asked.task, told.sandbox), told.record, end)
            except ScorerError as error:
                return Failed(FailedName.SCORER_ERROR, str(error))


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


def _written(text: bytes, after: Attempted, decoded: Decoded) -> bytes:
    """The line with another verdict."""
    if decoded.verdict_bytes is not None and not decoded.note:
        return dumps(verdict_line(after))[:-1] + text[decoded.verdict_bytes :]
    record = read_attempt(text).record
    notes = (*record.notes, decoded.note) if decoded.note else record.notes
    return dumps(told_line(replace(after, record=replace(record, notes=notes)))) + b"\n"
