"""From the measured parts to one number: the strategies of `env.scoring_strategy`.

    combined      correct: c + q; wrong: min(q, .9 c), so that it never outranks a correct answer
    correctness   1 or 0: nothing to gain but the right answer
    basic         .90 for the right answer, .10 for ending with one at all: a gradient for beginners

c is the weight of correctness, .50 unless `env.combined_weights` says otherwise; q is `quality`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.scorers.base import COMBINED_WEIGHTS
from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.quality import quality
from orchestrator.types import Ended, EndedName, Record, RolloutPlan, Score

log = logging.getLogger(__name__)

STRATEGIES = ("basic", "correctness", "combined")
WRONG_SHARE = 0.9  # of the weight of correctness: the most that a wrong answer gets


@dataclass(frozen=True, slots=True)
class StrategyScorer:
    """Measures every part, whatever the strategy makes of them. `debug` logs them.

    `weights`: of `combined`; what is left out weighs nothing.
    """

    strategy: str
    length_penalty_weight: float = 0.1
    debug: bool = False
    weights: Mapping[str, float] | None = None

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError where the task cannot be graded."""
        return await asyncio.to_thread(self.measure, plan, record, ended)

    def measure(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Pure; may take milliseconds, and what a generated task's own grading takes. Raises ScorerError."""
        parts = {
            "correctness": correctness(plan.task, record, ended),
            **quality(plan, record, ended, self.length_penalty_weight, self._weights),
        }
        score = Score(self._value(parts, ended.name is EndedName.FINISHED), parts)
        if self.debug:
            shown = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
            log.info("%s: %s %.4f (%s)", plan.rollout_id, self.strategy, score.value, shown)
        return score

    @property
    def _weights(self) -> Mapping[str, float]:
        return COMBINED_WEIGHTS if self.weights is None else self.weights

    def _value(self, parts: Mapping[str, float], finished: bool) -> float:
        if self.strategy == "correctness":
            return parts["correctness"]
        if self.strategy == "basic":
            return 0.9 * parts["correctness"] + (0.1 if finished else 0.0)
        weight = self._weights.get("correctness", 0.0)
        if parts["correctness"]:
            return min(1.0, weight + parts["quality"])
        return min(parts["quality"], WRONG_SHARE * weight)
