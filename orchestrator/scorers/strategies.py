"""From the measured parts to one number: the strategies of `env.scoring_strategy`.

    combined      correct: c + q; wrong: min(q, .9 c), so that it never outranks a correct answer
    correctness   1 or 0: nothing to gain but the right answer
    basic         .90 for the right answer, .10 for ending with one at all: a gradient for beginners

c is the weight of correctness, .50 unless `env.combined_weights` says otherwise; q is `quality`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.scorers.base import COMBINED_WEIGHTS, MADE_FROM
from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.quality import quality
from orchestrator.types import Completion, Ended, EndedName, Record, RolloutPlan, Score, Task

STRATEGIES = ("basic", "correctness", "combined")
WRONG_SHARE = 0.9  # of the weight of correctness: the most that a wrong answer gets


@dataclass(frozen=True, slots=True)
class StrategyScorer:
    """Measures every part, whatever the strategy makes of them. It is carried out in a process of its own
    (`processes`), as what it looks at was written by the model.

    `weights`: of `combined`; what is left out weighs nothing.
    """

    strategy: str
    length_penalty_weight: float = 0.1
    weights: Mapping[str, float] | None = None

    def measure(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Pure; may take milliseconds, and what a generated task's own grading takes. Raises ScorerError."""
        parts = {
            "correctness": correctness(plan.task, record, ended),
            **quality(plan, record, ended, self.length_penalty_weight, self._weights),
        }
        return Score(self._value(parts, ended.name is EndedName.FINISHED), parts)

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


def needed(plan: RolloutPlan, record: Record) -> tuple[RolloutPlan, Record]:
    """What `measure` looks at, and no more: ids and log-probs are most of a record, metadata may hold anything."""
    task = plan.task
    metadata = task.metadata if task.scorer == "reasoning_gym" else {}
    about = Task(
        task.task_id,
        "",
        task.answer,
        metadata={name: metadata[name] for name in MADE_FROM if name in metadata},
        scorer=task.scorer,
    )
    turns = tuple(
        replace(turn, prompt_ids=None, completion=_without_logprobs(turn.completion)) for turn in record.turns
    )
    return replace(plan, task=about), Record(record.started_at, turns, answer=record.answer)


def _without_logprobs(completion: Completion) -> Completion:
    """Whether there were ids is looked at, not which."""
    return replace(completion, tokens_T=None if completion.tokens_T is None else (), logprobs_T=None)
