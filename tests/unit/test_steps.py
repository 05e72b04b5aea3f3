"""What the rewards of a task's steps come to, and when it ends early."""

from __future__ import annotations

from typing import Literal

import pytest

from orchestrator.errors import ScorerError
from orchestrator.grading.steps import shortfall, total
from orchestrator.scorers.grader import GraderScorer
from orchestrator.types import Grade, Grader, Record, StepGrade, Task, TaskStep

GRADER = Grader("harbor")


def a_task(strategy: Literal["mean", "final"] = "mean", least: dict[str, float] | None = None) -> Task:
    steps = tuple(TaskStep(name, name, GRADER, least or {}) for name in ("a", "b", "c"))
    return Task("t", "a", grader=GRADER, steps=steps, steps_reward=strategy)


def graded(*rewards: dict[str, float]) -> tuple[StepGrade, ...]:
    names = ("a", "b", "c")
    return tuple(StepGrade(n, Grade(r, source="reward.json")) for n, r in zip(names, rewards, strict=False))


ONE, HALF, NONE = {"reward": 1.0}, {"reward": 0.5}, {"reward": 0.0}


@pytest.mark.parametrize(
    ("strategy", "least", "rewards", "score"),
    [
        ("mean", {}, (ONE, ONE, ONE), 1.0),
        ("mean", {}, (ONE, HALF, NONE), 0.5),
        ("final", {}, (ONE, ONE, HALF), 0.5),
        # The agent's own end: what it did not come to counts 0.
        ("mean", {}, (ONE,), 1 / 3),
        ("mean", {}, (ONE, HALF), 0.5),
        ("final", {}, (ONE, ONE), 0.0),
        # Below its min_reward: as in Harbor.
        ("mean", {"reward": 0.6}, (ONE, HALF), 0.75),
        ("final", {"reward": 0.6}, (ONE, HALF), 0.5),
        ("mean", {"quality": 0.1}, (ONE,), 1.0),
        ("mean", {"reward": 0.5}, (ONE, HALF), 0.5),
    ],
)
def test_the_reward_of_all_steps(
    strategy: Literal["mean", "final"],
    least: dict[str, float],
    rewards: tuple[dict[str, float], ...],
    score: float,
) -> None:
    task, steps = a_task(strategy, least), graded(*rewards)
    record = Record(0.0, grade=total(task, steps), step_grades=steps)
    measured = GraderScorer().measure(record)
    assert measured.value == pytest.approx(score)
    parts = {f"step {one.name}: reward": one.grade.rewards["reward"] for one in steps}
    assert {name: measured.parts[name] for name in parts} == parts


def test_a_reward_that_a_step_lacks_counts_0_and_another_name_can_be_the_score() -> None:
    grade = total(a_task(), graded({"reward": 1.0, "speed": 0.9}, ONE, ONE))
    assert grade.rewards == {"reward": 1.0, "speed": pytest.approx(0.3)}
    assert GraderScorer("speed").reward(grade) == pytest.approx(0.3)
    assert GraderScorer().reward(total(a_task(), graded(*[{"only": 1.0}] * 3))) == 1


def test_a_step_whose_grader_broke_is_no_score() -> None:
    steps = (*graded(ONE), StepGrade("b", Grade(fault="no file")))
    assert shortfall(a_task(), steps) == "no file"
    with pytest.raises(ScorerError, match="step b: no file"):
        GraderScorer().reward(total(a_task(), steps))
