"""From the measured parts to one number: the strategies of `env.scoring_strategy`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.quality import quality
from orchestrator.types import Ended, EndedName, Record, RolloutPlan, Score

log = logging.getLogger(__name__)

Parts = Mapping[str, float]

MAX_WRONG = 0.45


def combined(parts: Parts, finished: bool) -> float:
    """Correct: .50 + q. Wrong: min(q, .45), so that it never outranks a correct answer."""
    if parts["correctness"]:
        return min(1.0, 0.5 + parts["quality"])
    return min(parts["quality"], MAX_WRONG)


def correct_only(parts: Parts, finished: bool) -> float:
    """1 or 0: nothing to gain but the right answer."""
    return parts["correctness"]


def basic(parts: Parts, finished: bool) -> float:
    """.90 for the right answer and .10 for ending with one at all: a gradient for beginners."""
    return 0.9 * parts["correctness"] + (0.1 if finished else 0.0)


STRATEGIES: Mapping[str, Callable[[Parts, bool], float]] = {
    "basic": basic,
    "correctness": correct_only,
    "combined": combined,
}


@dataclass(frozen=True, slots=True)
class StrategyScorer:
    """Measures every part, whatever the strategy makes of them. `debug` logs them."""

    strategy: str
    length_penalty_weight: float = 0.1
    debug: bool = False

    def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError where the task cannot be graded."""
        parts = {
            "correctness": correctness(plan.task, record, ended),
            **quality(plan, record, ended, self.length_penalty_weight),
        }
        score = Score(STRATEGIES[self.strategy](parts, ended.name is EndedName.FINISHED), parts)
        if self.debug:
            shown = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
            log.info("%s: %s %.4f (%s)", plan.rollout_id, self.strategy, score.value, shown)
        return score
