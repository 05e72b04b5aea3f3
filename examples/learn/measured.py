"""What an evaluation found, task by task, and whether a later one found more."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.rules.estimates import wilson

CHANCE = 0.05  # that any set of a run counts as learned though nothing was


@dataclass(frozen=True)
class Share:
    """Of tasks solved, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


class Measured:
    """One evaluation. A sample that broke counts as wrong, so that all rounds are measured by the same tasks."""

    def __init__(self, folder: Path) -> None:
        self.samples = list(read_lines(folder / "samples.jsonl"))

    @property
    def missing(self) -> int:
        """Samples that broke."""
        return sum(sample["correct"] is None for sample in self.samples)

    def first(self) -> dict[str, Mapping[str, Any]]:
        """The first sample of each task."""
        return {sample["task_id"]: sample for sample in reversed(self.samples)}

    def right(self, level: str | None = None) -> dict[str, float]:
        """The share of right samples, task by task: of all tasks, or of one set."""
        right = defaultdict(list)
        for sample in self.samples:
            if level in (None, sample["level"]):
                right[sample["task_id"]].append(bool(sample["correct"]))
        return {name: sum(found) / len(found) for name, found in right.items()}

    def share(self, level: str | None = None) -> Share:
        """Of the tasks solved. Each weighs the same."""
        right = self.right(level)
        value = math.fsum(right.values()) / len(right)
        return Share(value, *wilson(value, len(right)))


def by_chance(before: Measured, after: Measured, level: str | None = None) -> float:
    """How likely it is that so many of the tasks that changed are solved more often than before, if more and less
    often were equally likely: the exact one-sided sign test, which for one sample of each task is McNemar's."""
    earlier, later = before.right(level), after.right(level)
    changed = [later[name] - earlier[name] for name in earlier if later.get(name, earlier[name]) != earlier[name]]
    rose, count = sum(change > 0 for change in changed), len(changed)
    return float(sum(math.comb(count, more) for more in range(rose, count + 1)) / 2**count)


def learned(before: Measured, after: Measured, sets: list[str]) -> list[str]:
    """The sets that were. Each is tested at its part of CHANCE, because there are several."""
    return [name for name in sets if by_chance(before, after, name) <= CHANCE / len(sets)]


def read_lines(path: Path) -> Iterator[Any]:
    """Of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
