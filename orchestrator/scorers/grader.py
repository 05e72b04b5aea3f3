"""`env.scoring_strategy grader`: the score is a reward of the task's grader; its other rewards are parts."""

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.errors import ScorerError
from orchestrator.types import Checked, Ended, Grade, Record, RolloutPlan, Score

REWARD = "reward"
GRADER = "grader"


@dataclass(frozen=True, slots=True)
class GraderScorer:
    """`key`: the reward's name; None: `reward`, or the only one."""

    key: str | None = None

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Pure. Raises ScorerError."""
        graders = plan.task.graders
        return self.measure(record, graders[-1].checked if graders else None)

    def measure(self, record: Record, checked: Checked | None = None) -> Score:
        """`checked` as for `reward`. Raises ScorerError."""
        grade = record.grade
        if grade is None:
            raise ScorerError("what the agent left was not graded")
        steps = {
            f"step {step.name}: {name}": value
            for step in record.step_grades
            for name, value in step.grade.rewards.items()
        }
        return Score(self.reward(grade, checked), {**grade.rewards, **steps})

    def reward(self, grade: Grade, checked: Checked | None = None) -> float:
        """The one that is the score. `checked`: what is known of the task's own solution; a reward that it gets,
        and that is missing here or out of bounds, is 0: what the agent left does that. Raises ScorerError."""
        if grade.fault:
            raise ScorerError(grade.fault)
        if not grade.source:  # it came to none, by what the agent left
            return 0.0
        name = self._name(grade.rewards)
        value = grade.rewards.get(name)
        if value is not None and 0 <= value <= 1:
            return value
        if checked is not None and self._name(checked.rewards) in checked.rewards:
            return 0.0
        if value is not None:
            raise ScorerError(f"the grader's reward is {value:g}, not from 0 to 1")
        given = ", ".join(map(ascii, grade.rewards))
        raise ScorerError(f"the grader gave no reward {name!a}, but {given}: set --env.reward_key")

    def _name(self, rewards: Collection[str]) -> str:
        return self.key or (REWARD if REWARD in rewards or len(rewards) != 1 else next(iter(rewards)))
