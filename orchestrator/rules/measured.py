"""What a run measured, task by task: how many samples of each are right, and what follows for all. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.rules.estimates import Estimate, estimate_pass_at_k

PARTS = ("level", "source")


@dataclass(slots=True)
class MeasuredTask:
    """One task: how many of its samples were judged, how many of those are correct, the sum of their scores.
    `group`: the number of its group in the run."""

    level: str | None
    source: str
    samples: int = 0
    correct: int = 0
    scores: float = 0.0
    group: int = 0

    @property
    def share(self) -> float:
        """The share of its samples that are correct."""
        return self.correct / self.samples

    @property
    def score(self) -> float:
        """The mean score of its samples."""
        return self.scores / self.samples


def pass_at(tasks: Iterable[MeasuredTask], k: int) -> Estimate | None:
    """pass@k over tasks; None where none of them has k samples."""
    return estimate_pass_at_k([(task.samples, task.correct) for task in tasks], k)


def mean_score(tasks: Iterable[MeasuredTask]) -> float | None:
    """The mean score. Tasks have equal weight, as in `pass_at`. None where no sample was judged."""
    means = [task.score for task in tasks if task.samples]
    return math.fsum(means) / len(means) if means else None


def by_part(tasks: Iterable[MeasuredTask], part: str) -> dict[str, list[MeasuredTask]]:
    """Tasks by their `level` or `source`, sorted by that name. Tasks without one are left out."""
    parts: dict[str, list[MeasuredTask]] = {}
    for task in tasks:
        if label := getattr(task, part):
            parts.setdefault(label, []).append(task)
    return dict(sorted(parts.items()))


def parts_of(tasks: Sequence[MeasuredTask]) -> list[tuple[str, Sequence[MeasuredTask]]]:
    """All tasks, those of each level, and of each source if there are several: each with its label."""
    parts: list[tuple[str, Sequence[MeasuredTask]]] = [("all", tasks)]
    for part in PARTS:
        labels = by_part(tasks, part)
        if len(labels) > 1 or part == "level":
            parts += [(f"{part} {label}", some) for label, some in labels.items()]
    return parts
