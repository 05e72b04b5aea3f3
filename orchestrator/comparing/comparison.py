"""Several runs side by side: what each one did, and how the others differ from the first, task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.report.measured import TaskCounts
from orchestrator.report.reader import read_run
from orchestrator.report.totals import Row, outcome_counts
from orchestrator.rules.estimates import Estimate, estimate_difference, estimate_share
from orchestrator.rules.measured import PARTS, MeasuredTask, by_part, pass_at
from orchestrator.run.files import find_run, read_description, report_of
from orchestrator.run.lenient import mapping, objects, text
from orchestrator.run.prices import NO_PRICES, PriceList

CHANGED = 10  # most tasks in the list of those that changed


class RunCounts(TaskCounts):
    """Counts what is compared while a run is read. Memory grows with its tasks, not with its rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = 0
        self.duration_s = 0.0

    def count(self, row: Row, group: Row, by: int = 1) -> None:
        """See `report.reader.Counting`."""
        super().count(row, group, by)
        if row["counts"]:
            self.prompt_tokens += by * row["prompt_tokens"]
            self.duration_s += by * (row["duration_s"] or 0.0)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What one run did. `outcomes`, tokens, seconds and cost are of all attempts. `cost` None: no prices are
    known. `report`: its report, if it lies where the run's commands write it."""

    name: str
    model: str
    outcomes: Counter[str]
    tasks: Mapping[str, MeasuredTask]
    bad_tasks: int
    sampled_tokens: int
    prompt_tokens: int
    duration_s: float
    cost: float | None
    report: Path | None

    @classmethod
    def read(cls, path: Path, price_list: PriceList = NO_PRICES) -> ComparedRun:
        """A run directory. Raises ConfigError if there is none, or no rollout in it, or no price of its model."""
        files = find_run(path)
        if files.directory is None:
            raise ConfigError(f"{path} is a groups file: name the run's directory, which has all rollouts")
        description = read_description(files.directory)
        counts = RunCounts()
        totals = read_run(files.directory, None, also=counts, price_list=price_list).totals
        if not totals.attempts:
            raise ConfigError(f"{path} holds no rollout")
        servers = objects(mapping(description.get("config")).get("openai"))
        return cls(
            name=str(path),
            model=", ".join(dict.fromkeys(text(server.get("model_name"), 80) for server in servers)),
            outcomes=outcome_counts(totals),
            tasks={name: task for name, task in counts.tasks.items() if task.samples},
            bad_tasks=totals.bad_tasks,
            sampled_tokens=totals.tokens,
            prompt_tokens=counts.prompt_tokens,
            duration_s=counts.duration_s,
            cost=totals.cost,
            report=report if (report := report_of(files)).is_file() else None,
        )

    @property
    def attempts(self) -> int:
        return sum(self.outcomes.values()) - self.bad_tasks

    @property
    def rollouts(self) -> int:
        """Those that were scored."""
        return sum(task.samples for task in self.tasks.values())

    def solved(self, tasks: Iterable[MeasuredTask] | None = None) -> Estimate | None:
        """The mean share of solved rollouts over tasks; None: none was scored."""
        chosen = self.tasks.values() if tasks is None else tasks
        return pass_at(chosen, 1)

    def score(self) -> Estimate | None:
        """The mean score over tasks."""
        return estimate_share([task.score for task in self.tasks.values()])

    @property
    def scores_say_more(self) -> bool:
        """Whether a score is not just whether the task was solved."""
        return any(task.scores != task.correct for task in self.tasks.values())

    def by(self, part: str) -> dict[str, list[MeasuredTask]]:
        """Tasks by `level` or `source`, sorted; tasks without one are left out."""
        return by_part(self.tasks.values(), part)


@dataclass(frozen=True, slots=True)
class Difference:
    """How a run differs from the first on the tasks that both have. `changed`: (task, share before, share now),
    the greatest changes first. The estimates are None for fewer than three tasks."""

    tasks: int
    solved: Estimate | None
    score: Estimate | None
    better: int
    worse: int
    changed: Sequence[tuple[str, float, float]] = field(default_factory=tuple)

    @classmethod
    def of(cls, first: ComparedRun, other: ComparedRun) -> Difference:
        shared = [(name, task, other.tasks[name]) for name, task in first.tasks.items() if name in other.tasks]
        by = _differences(shared, lambda task: task.share)
        changed = sorted(
            ((name, before.share, now.share) for name, before, now in shared if before.share != now.share),
            key=lambda it: (-abs(it[2] - it[1]), it[0]),
        )
        return cls(
            tasks=len(shared),
            solved=estimate_difference(by),
            score=estimate_difference(_differences(shared, lambda task: task.score)),
            better=sum(value > 0 for value in by),
            worse=sum(value < 0 for value in by),
            changed=changed[:CHANGED],
        )


def _differences(
    shared: Iterable[tuple[str, MeasuredTask, MeasuredTask]], value: Callable[[MeasuredTask], float]
) -> list[float]:
    return [value(now) - value(before) for _, before, now in shared]


def as_json(runs: Sequence[ComparedRun], differences: Sequence[Difference]) -> dict[str, Any]:
    """All of it as plain values and Estimates."""
    return {
        "runs": [_run(run) for run in runs],
        "differences_from_the_first": [
            {
                "run": run.name,
                "tasks_of_both": difference.tasks,
                "solved": difference.solved,
                "score": difference.score,
                "tasks_better": difference.better,
                "tasks_worse": difference.worse,
                "changed_most": [
                    {"task": task, "solved_before": before, "solved_now": now}
                    for task, before, now in difference.changed
                ],
            }
            for run, difference in zip(runs[1:], differences, strict=True)
        ],
    }


def _run(run: ComparedRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "model": run.model,
        "outcomes": dict(run.outcomes.most_common()),
        "attempts": run.attempts,
        "scored_rollouts": run.rollouts,
        "tasks": len(run.tasks),
        "solved": run.solved(),
        "score": run.score(),
        **{
            f"solved_by_{part}": {label: run.solved(tasks) for label, tasks in run.by(part).items()}
            for part in PARTS
        },
        "sampled_tokens": run.sampled_tokens,
        "prompt_tokens": run.prompt_tokens,
        "seconds": run.duration_s,
        "cost": run.cost,
    }
