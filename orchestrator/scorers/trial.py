"""One trial of the operator's scorer, or of the judge, before anything is sampled.

It is asked about a plain rollout of the run's first task that gives the reference answer: the control that later
decides whose fault a failure is. So what fails here could score no rollout, or could tell nobody's fault.
"""

from __future__ import annotations

import asyncio

from orchestrator.errors import ScorerError, ScorerUnusable
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer, first_control
from orchestrator.scorers.judge import JudgeScorer
from orchestrator.types import RolloutPlan


class Trial:
    """Of one scorer, for all groups of a run."""

    def __init__(self, scorer: ControlledScorer | JudgeScorer) -> None:
        self._scorer = scorer
        self._trying = asyncio.Lock()
        self._passed = False

    @classmethod
    def of(cls, scorer: Scorer) -> Trial | None:
        """None: our own strategies need no trial."""
        if isinstance(scorer, JudgeScorer) or (
            isinstance(scorer, ControlledScorer) and isinstance(scorer.grades_with, str)
        ):
            return cls(scorer)
        return None

    async def passed(self, plan: RolloutPlan, *, ids: bool, output: bool) -> None:
        """Returns once the trial is passed, or if this task is none to try a judge with. Raises ScorerUnusable;
        AuthenticationError for the judge's key. `ids`, `output`: as for `first_control`."""
        async with self._trying:
            if self._passed:
                return
            control = first_control(plan, ids=ids, output=output)
            try:
                self._passed = await self._scorer.try_out(plan, control)
            except ScorerError as error:
                raise ScorerUnusable(
                    f"env.scoring_strategy: {error}; it was tried on the answer {control.answer!a:.80} to task "
                    f"{plan.task.task_id!r}, before anything was sampled"
                ) from error
