"""Decides by a control whose fault it is that a rollout could not be scored.

The control is a plain rollout of the same task that gives the reference answer and holds nothing of the policy's.
If it can be scored, the rollout is graded once more: what grading needs may have come back in between. Only if
that fails too, and another control can be scored after it, the rollout's own text is at fault: it gets 0, with
both on record, and is not drawn again. Otherwise grading is broken.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.errors import ScorerError
from orchestrator.rules.control import Control, ControlAnswer
from orchestrator.scorers.manners import plain_answer
from orchestrator.scorers.processes import GradingProcesses, Ungraded
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import (
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Message,
    Output,
    Record,
    RolloutPlan,
    Score,
    Step,
    Turn,
)

FRESH_S = 10.0  # how old the first control may be: many failing answers share one
NEUTRAL_ANSWER = "I do not know."
FINISHED = Ended(EndedName.FINISHED)


class Controls:
    """One control per task, kept as long as it can be shared. `timeout_s`: time limit of one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_task: dict[str, tuple[float, Control]] = {}

    async def answer(
        self, task_id: str, ask: Callable[[], Awaitable[str]], *, age_s: float = 0.0
    ) -> ControlAnswer:
        """The result of `ask` for this task, at most `age_s` old."""
        now = asyncio.get_running_loop().time()
        self._by_task = {
            task: entry for task, entry in self._by_task.items() if now < entry[0] + FRESH_S + self._timeout_s
        }
        _, control = self._by_task.get(task_id, (now, Control(ask, timeout_s=self._timeout_s)))
        self._by_task[task_id] = (now, control)
        return await control.answer(age_s=age_s)


class ControlledScorer:
    """A `Scorer` in processes of its own. `unsolved`: the score's parts if the rollout is at fault."""

    def __init__(self, processes: GradingProcesses, unsolved: Mapping[str, float] | None = None) -> None:
        self._processes = processes
        self._unsolved = unsolved or {}
        self._controls = Controls(math.inf)  # the process has a time limit itself

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError."""
        try:
            return await self._processes.ask(plan, record, ended)
        except Ungraded as failure:
            return await self._decide(plan, record, ended, str(failure))

    async def score_batch(self, rollouts: Sequence[bytes]) -> list[Score | None]:
        """Scores of many rollouts that were `processes.packed`, in their order. None: it needs `score`, which says
        who is at fault."""
        try:
            return await self._processes.ask_batch(rollouts)
        except Ungraded:
            return [None] * len(rollouts)

    async def try_out(self, plan: RolloutPlan, record: Record) -> bool:
        """Scores this control; True: there is always one. Raises ScorerError."""
        try:
            await self._processes.ask(plan, record, FINISHED)
        except Ungraded as failure:
            raise ScorerError(str(failure)) from failure
        return True

    @property
    def grades_with(self) -> StrategyScorer | str:
        """What the processes score with, to pack rollouts for."""
        return self._processes.scorer

    async def _decide(self, plan: RolloutPlan, record: Record, ended: Ended, failure: str) -> Score:
        plain = control_record(plan, record)

        async def ask() -> str:
            return f"{(await self._processes.ask(plan, plain, FINISHED)).value:g}"

        control = await self._controls.answer(plan.task.task_id, ask, age_s=FRESH_S)
        if control.served:
            try:
                return await self._processes.ask(plan, record, ended)
            except Ungraded as again:
                failure = str(again)
            control = await self._controls.answer(plan.task.task_id, ask)
        if control.failure is not None:
            also = "" if str(control.failure) == failure else f"; a control: {control.failure}"
            raise ScorerError(failure + also) from control.failure
        return Score(0.0, dict(self._unsolved), evidence(failure, plain.answer, control))


def evidence(failure: str, answer: str | None, control: ControlAnswer) -> dict[str, Any]:
    """The evidence of a score that a control decided: the failure, and the control's answer and score."""
    return {"failure": failure, "control": {"answer": answer, "got": control.reply}}


def first_control(plan: RolloutPlan, *, ids: bool, output: bool) -> Record:
    """A control's record before there is a rollout to make it like. `ids`: with token ids and log-probs; `output`:
    rollouts leave files."""
    prompt = (Message("system", "You solve tasks."), Message("user", plan.task.question))
    begun = Completion("", "", "stop", (0,) if ids else None, (0.0,) if ids else None, 1, 1)
    turn = Turn(1, CompletionKind.ACTION, 0, prompt, 0, (0,) if ids else None, "", begun, 0.0, 1.0)
    step = Step(1, "", "", "", "", "", is_final_answer=False, duration_s=0.0)
    return control_record(plan, Record(0.0, (turn,), steps=(step,), output=Output() if output else None))


def control_record(plan: RolloutPlan, record: Record) -> Record:
    """The record of a rollout with one plain turn after the first prompt, which holds only the task. It has ids,
    log-probs and steps where `record` has them."""
    answer = NEUTRAL_ANSWER if plan.task.answer is None else plan.task.answer
    first = record.turns[0]
    visible, text = plain_answer(plan.agent, answer, as_data=bool(first.tools))
    ids = None if first.completion.tokens_T is None else (first.prompt_ids or (0,))[-1:]
    completion = Completion(
        text=text,
        visible=visible,
        finish_reason="stop",
        tokens_T=ids,  # an id of the prompt, as there is no tokenizer here to encode the text
        logprobs_T=None if ids is None or first.completion.logprobs_T is None else (0.0,),
        prompt_tokens=first.completion.prompt_tokens,
        completion_tokens=1,
        policy_version=first.completion.policy_version,
    )
    turn = replace(first, kind=CompletionKind.ACTION, closing="", completion=completion, agent="")
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
