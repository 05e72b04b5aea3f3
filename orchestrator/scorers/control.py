"""Whose fault it is that no score came of a rollout: the scorer is asked about a control, with no word of the policy's.

The control is a plain rollout of the same task that gives the reference answer. Where that is scored, the rollout's
own words are at fault: it gets 0, with both on record, and is not drawn again. Where it is not, grading is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from orchestrator.errors import ScorerError
from orchestrator.scorers.manners import plain_answer
from orchestrator.scorers.processes import GradingProcesses, Ungraded
from orchestrator.types import (
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Output,
    Record,
    RolloutPlan,
    Score,
    Step,
)

T = TypeVar("T")
FRESH_S = 10.0  # for how long a control stands for those after it: many failing answers ask one
NEUTRAL_ANSWER = "I do not know."
FINISHED = Ended(EndedName.FINISHED)


@dataclass(slots=True)
class _Kept(Generic[T]):
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    until: float = 0.0  # loop time
    came: T | Exception | None = None


class Controls(Generic[T]):
    """One control per task at a time, and one for all who ask within FRESH_S."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept[T]] = {}

    async def of(self, task_id: str, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives for this task's control. Raises what it raises."""
        now = asyncio.get_running_loop().time
        for stale in [t for t, kept in self._kept.items() if kept.until < now() and not kept.lock.locked()]:
            del self._kept[stale]
        kept = self._kept.setdefault(task_id, _Kept())
        async with kept.lock:
            if kept.came is None or kept.until < now():
                try:
                    kept.came = await ask()
                except Exception as error:
                    kept.came = error
                kept.until = now() + FRESH_S
        if isinstance(kept.came, Exception):
            raise kept.came
        return kept.came


class ControlledScorer:
    """A `Scorer` in processes of its own. `unsolved`: the parts of a rollout that is itself at fault."""

    def __init__(self, processes: GradingProcesses, unsolved: Mapping[str, float] | None = None) -> None:
        self._processes = processes
        self._unsolved = unsolved or {}
        self._controls: Controls[Score] = Controls()

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError."""
        try:
            return await self._processes.ask(plan, record, ended)
        except Ungraded as failure:
            return await self._blamed(plan, record, str(failure))

    async def _blamed(self, plan: RolloutPlan, record: Record, failure: str) -> Score:
        plain = control_record(plan, record)
        try:
            control = await self._controls.of(
                plan.task.task_id, lambda: self._processes.ask(plan, plain, FINISHED)
            )
        except Ungraded as error:
            raise ScorerError(failure if str(error) == failure else f"{failure}; a control: {error}") from error
        return Score(0.0, dict(self._unsolved), evidence(failure, plain.answer, control.value))


def evidence(failure: str, answer: str | None, control: object) -> dict[str, Any]:
    """What is on record of a score that a control decided: what failed, and what the control's answer got."""
    return {"failure": failure, "control": {"answer": answer, "got": control}}


def control_record(plan: RolloutPlan, record: Record) -> Record:
    """A rollout of one plain turn behind the first prompt, which is the task's alone, in the form of `record`."""
    answer = NEUTRAL_ANSWER if plan.task.answer is None else plan.task.answer
    visible, text = plain_answer(plan.agent, answer)
    first = record.turns[0]
    ids = None if first.completion.tokens_T is None else (first.prompt_ids or (0,))[-1:]
    completion = Completion(
        text=text,
        visible=visible,
        finish_reason="stop",
        tokens_T=ids,  # no word of the policy's: nobody here can make the text's own
        logprobs_T=None if ids is None or first.completion.logprobs_T is None else (0.0,),
        prompt_tokens=first.completion.prompt_tokens,
        completion_tokens=1,
        policy_version=first.completion.policy_version,
    )
    turn = replace(first, kind=CompletionKind.ACTION, closing="", completion=completion, retries=0, agent="")
    step = Step(1, text, visible, "", "", "", is_final_answer=True, duration_s=0.0)
    return Record(
        started_at=record.started_at,
        turns=(turn,),
        steps=(step,) if record.steps else (),
        answer=answer,
        sandbox_id=record.sandbox_id,
        duration_s=turn.ended_s,
        output=None if record.output is None else Output(),
    )
