"""A task of several steps: when it ends early, and what its steps' rewards come to. Pure.

As Harbor has it, but for one thing: there a step that nobody came to counts nothing, whatever the reason was. Here
it does so only where a reward of an earlier step was too low for the task to go on. Where the agent itself ended
the rollout (its time, its budget, its sandbox), each step that it did not come to counts 0: else ending early
would pay.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.grading.reports import MAX_TESTS
from orchestrator.grading.rewards import REWARD
from orchestrator.types import Grade, StepGrade, Task

STEPS = "steps"  # the source of the rewards


def of_step(task: Task, number: int, grade: Grade) -> StepGrade:
    """What goes on record of it: of single tests, its share of what a record holds."""
    most = MAX_TESTS // len(task.steps)
    return StepGrade(task.steps[number].name, replace(grade, tests=grade.tests[:most]))


def shortfall(task: Task, graded: Sequence[StepGrade]) -> str:
    """Why the task does not go on behind the last of these steps; empty: it does."""
    last, step = graded[-1].grade, task.steps[len(graded) - 1]
    if last.fault:
        return last.fault
    low = [name for name, least in step.least.items() if last.rewards.get(name, -math.inf) < least]
    return f"the reward {low[0]!a} of step {step.name} is below its min_reward" if low else ""


def total(task: Task, graded: Sequence[StepGrade]) -> Grade:
    """The grade of all of them. Those that are missing at the end were not come to."""
    if fault := next((f"step {one.name}: {one.grade.fault}" for one in graded if one.grade.fault), ""):
        return Grade(fault=fault)
    ended_early = bool(shortfall(task, graded))
    missed = 0 if ended_early else len(task.steps) - len(graded)
    names = dict.fromkeys(name for one in graded for name in one.grade.rewards) or {REWARD: None}
    rewards = dict.fromkeys(names, 0.0)
    if task.steps_reward == "mean":
        count = len(graded) + missed
        rewards = {name: sum(one.grade.rewards.get(name, 0.0) for one in graded) / count for name in names}
    elif not missed:
        rewards = dict(graded[-1].grade.rewards)
    skipped = [step.name for step in task.steps[len(graded) :]]
    flags = [f"step {one.name}: {flag}" for one in graded for flag in one.grade.flags]
    flags += [shortfall(task, graded)] if ended_early and skipped else []
    flags += [f"steps that were not come to: {', '.join(skipped)}"] if skipped else []
    costs = [one.grade.cpu_s for one in graded]
    return Grade(
        rewards,
        source=STEPS,
        scope=graded[-1].grade.scope,
        kept=graded[-1].grade.kept,
        flags=tuple(flags),
        duration_s=sum(one.grade.duration_s for one in graded),
        cpu_s=None if None in costs else sum(cost or 0.0 for cost in costs),
    )
