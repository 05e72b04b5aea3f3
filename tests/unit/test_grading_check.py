"""What a check says of a task whose own solution does not get 1 each time."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.grading.check import TaskChecker, seen
from orchestrator.scorers.grader import GraderScorer
from orchestrator.types import Checked, Grade, Grader, Task, TaskCheck
from tests.fakes.plans import a_writable_sandbox

SERVICE = "it needs a service left running: its own solution gets 1 only where that still runs"
CHANCE = (
    "its own solution gets {}, and must get 1 each time: "
    "its tests or its solution must not depend on chance or time"
)


async def check(monkeypatch: pytest.MonkeyPatch, fresh: list[float], live: float) -> TaskCheck:
    """`fresh`: what the solution gets at each try; `live`: beside what it left running."""
    left = iter(fresh)

    async def played(*given: Any, **more: Any) -> Grade:
        return Grade({"reward": next(left)}, source="reward.txt")

    async def beside(checker: TaskChecker, solution: str) -> float:
        return live

    monkeypatch.setattr(TaskChecker, "_played", played)
    monkeypatch.setattr(TaskChecker, "_live", beside)
    task = Task("t", "q", grader=Grader("harbor", tests="/tests"))
    score, launcher = GraderScorer("reward").reward, None
    spec = a_writable_sandbox("image")
    checker = TaskChecker(task, "", spec, launcher, score, solution="/s", library=None, solve_s=1)  # type: ignore[arg-type]
    return await checker.check()


@pytest.mark.parametrize(
    ("fresh", "live", "tries", "failure"),
    [
        ([0, 0, 0], 1, (0, 0, 0), SERVICE),
        ([0, 1], 1, (0, 1), CHANCE.format("0, 1")),
        ([0, 0, 1], 1, (0, 0, 1), CHANCE.format("0, 1")),
        ([1, 1, 0], 1, (1, 1, 0), CHANCE.format("1, 0")),
        ([0], 0, (0,), "its own solution gets 0, and must get 1"),
    ],
)
async def test_chance_is_told_from_a_service(
    monkeypatch: pytest.MonkeyPatch, fresh: list[float], live: float, tries: tuple[float, ...], failure: str
) -> None:
    found = await check(monkeypatch, fresh, live)
    assert (found.solution, found.failures) == (tries, (failure,))


def test_rewards_are_known_that_the_solution_gets_each_time() -> None:
    first = seen(Checked(), Grade({"reward": 1.0, "seconds": 3.0, "a": 0.5}, source="reward.json", duration_s=2.0))
    both = seen(first, Grade({"reward": 1.0, "seconds": 0.5, "b": 0.5}, source="reward.json", duration_s=1.0))
    assert (first.rewards, both.rewards) == (("a", "reward"), ("reward",))
    assert (both.source, both.duration_s) == ("reward.json", 2.0)
