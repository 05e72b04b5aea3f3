"""What an evaluation measured, read from its record: the accuracy table of its page, and its hardest tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from orchestrator.report.totals import Row
from orchestrator.rules.estimates import Estimate, sizes_of_k
from orchestrator.rules.measured import MeasuredTask, mean_score, parts_of, pass_at
from orchestrator.types import FailedName

HARDEST = 12  # tasks in that list
MOST_PARTS = 50  # rows of levels and sources


class TaskCounts:
    """Counts the tasks of a run while it is read, see `summary.Counting`. Memory grows with its tasks."""

    def __init__(self) -> None:
        self.tasks: dict[str, MeasuredTask] = {}

    def kept(self) -> dict[str, Any]:
        """For JSON."""
        return {name: asdict(task) for name, task in self.tasks.items()}

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> TaskCounts:
        """The inverse of `kept`."""
        counts = cls()
        counts.tasks = {name: MeasuredTask(**task) for name, task in kept.items()}
        return counts

    def count(self, row: Row, group: Row, by: int = 1) -> None:
        """As `Counting`."""
        if row["outcome"] == FailedName.BAD_TASK:
            return
        task = self.tasks.get(group["task"])
        if task is None:
            task = self.tasks[group["task"]] = MeasuredTask(group["level"], group["source"], group=group["number"])
        if row["score"] is not None:
            task.samples += by
            task.correct += by * row["solved"]
            task.scores += by * min(1.0, max(0.0, row["score"]))

    def shown(self, samples_per_task: int) -> dict[str, Any]:
        """What the page shows of it: for all tasks and for each part the estimates of pass@k, as `astuple` of an
        Estimate; and the tasks that were solved least. `missing`: samples that were not judged."""
        tasks = list(self.tasks.values())
        sizes = sizes_of_k(samples_per_task)
        judged = sorted(
            ((name, task) for name, task in self.tasks.items() if task.samples > 0 and task.share < 1),
            key=lambda it: (it[1].share, it[1].score, it[1].group),
        )
        return {
            "samples_per_task": samples_per_task,
            "tasks": len(tasks),
            "missing": max(0, samples_per_task * len(tasks) - sum(task.samples for task in tasks)),
            "sizes": sizes,
            "parts": [_part(label, some, sizes) for label, some in parts_of(tasks)[:MOST_PARTS]],
            "unsolved": sum(not task.correct for task in tasks if task.samples),
            "hardest": [(task.group, name, task.correct, task.samples) for name, task in judged[:HARDEST]],
        }

    def accuracy(self) -> Estimate | None:
        """Of all tasks; None: no sample was judged."""
        return pass_at(self.tasks.values(), 1)


def _part(label: str, tasks: Sequence[MeasuredTask], sizes: Sequence[int]) -> dict[str, Any]:
    estimates = [pass_at(tasks, k) for k in sizes]
    return {
        "label": label,
        "tasks": len(tasks),
        "samples": sum(task.samples for task in tasks),
        "correct": sum(task.correct for task in tasks),
        "score": mean_score(tasks),
        "estimates": [None if one is None else astuple(one) for one in estimates],
    }
