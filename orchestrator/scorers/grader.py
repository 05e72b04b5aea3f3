"""`env.scoring_strategy grader`: the score is a reward of the task's grader; its other rewards are parts."""

from dataclasses import dataclass

from orchestrator.errors import ScorerError
from orchestrator.types import Ended, Grade, Record, RolloutPlan, Score

REWARD = "reward"
GRADER = "grader"


@dataclass(frozen=True, slots=True)
class GraderScorer:
    """`key`: the reward's name; None: `reward`, or the only one."""

    key: str | None = None

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Pure. Raises ScorerError."""
        return self.measure(record)

    def measure(self, record: Record) -> Score:
        """Raises ScorerError."""
        grade = record.grade
        if grade is None:
            raise ScorerError("what the agent left was not graded")
        steps = {
            f"step {step.name}: {name}": value
            for step in record.step_grades
            for name, value in step.grade.rewards.items()
        }
        return Score(self.reward(grade), {**grade.rewards, **steps})

    def reward(self, grade: Grade) -> float:
        """The one that is the score. Raises ScorerError."""
        if grade.fault:
            raise ScorerError(grade.fault)
        value = self._value(grade)
        if not 0 <= value <= 1:
            raise ScorerError(f"the grader's reward is {value:g}, not from 0 to 1")
        return value

    def _value(self, grade: Grade) -> float:
        rewards = grade.rewards
        if not grade.source:  # it came to none, by what the agent left
            return 0.0
        name = self.key or (REWARD if REWARD in rewards or len(rewards) != 1 else next(iter(rewards)))
        if name not in rewards:
            raise ScorerError(
                f"the grader gave no reward {name!a}, but {', '.join(map(ascii, rewards))}: set --env.reward_key"
            )
        return rewards[name]
