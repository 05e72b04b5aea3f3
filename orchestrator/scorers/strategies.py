"""The strategies of `env.scoring_strategy`: they make one number of the measured parts.

    combined      correct: c + q; wrong: min(q, .9 c), so that a wrong answer never outranks a correct one
    correctness   1 or 0
    basic         .90 for the right answer and .10 for any final answer: a gradient for weak models

c is the weight of correctness, .50 unless `env.combined_weights` says otherwise; q is `quality`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.scorers.base import MADE_FROM
from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.quality import quality
from orchestrator.scorers.weights import COMBINED_WEIGHTS
from orchestrator.types import Completion, Ended, EndedName, Record, RolloutPlan, Score, Task

STRATEGIES = ("basic", "correctness", "combined")
WRONG_SHARE = 0.9  # a wrong answer gets at most this share of the weight of correctness


@dataclass(frozen=True, slots=True)
class StrategyScorer:
    """Measures every part, also those that the strategy does not use. Runs in a process of its own (`processes`),
    as it handles text that the model wrote.

    `weights`: of `combined`; a missing one is 0.
    """

    strategy: str
    length_penalty_weight: float = 0.1
    weights: Mapping[str, float] | None = None

    def measure(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Pure; takes milliseconds, for reasoning_gym's tasks as long as their scoring. Raises ScorerError."""
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
    """Only what `measure` needs: ids and log-probs are most of a record, and metadata may hold anything."""
    task = plan.task
    metadata = task.metadata if task.scorer == "reasoning_gym" else {}
    about = Task(
        task.task_id,
        "",
        task.answer,
        metadata={name: metadata[name] for name in MADE_FROM if name in metadata},
        scorer=task.scorer,
        other_answers=task.other_answers,
    )
    turns = tuple(
        replace(turn, prompt_ids=None, completion=_without_logprobs(turn.completion)) for turn in record.turns
    )
    return replace(plan, task=about), Record(record.started_at, turns, answer=record.answer)


def _without_logprobs(completion: Completion) -> Completion:
    """Keeps whether there were ids, but not the ids."""
    return replace(completion, tokens_T=None if completion.tokens_T is None else (), logprobs_T=None, spans=())
