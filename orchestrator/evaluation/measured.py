"""Counts what an evaluation measured, task by task: what the scorer calls solved, and its mean score.

A sample that broke for reasons that are not the model's is not a wrong answer: it is counted as missing. The
accuracy with missing samples as wrong answers is given beside it.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.rules.estimates import Estimate, sizes_of_k
from orchestrator.rules.measured import MeasuredTask, by_part, mean_score, pass_at
from orchestrator.rules.observer import Listener
from orchestrator.run.prices import Prices
from orchestrator.types import Attempt, BadTask, FailedName, Group, last_attempts

SPENT = ("steps", "prompt_tokens", "completion_tokens", "duration_s", "waiting_s")


@dataclass(slots=True)
class Evaluation(Listener):
    """The counts so far. `sums` are over judged samples, `cost` over all attempts."""

    samples_per_task: int
    prices: Prices | None = None
    started: float = field(default_factory=time.time)
    tasks: list[MeasuredTask] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    bad_tasks: int = 0
    retries: int = 0
    cost: float = 0.0

    def bad_task(self, task: BadTask) -> None:
        self.bad_tasks += 1

    def take(self, group: Group) -> None:
        """Counts one task when all its attempts are made."""
        if all(attempt.outcome.name is FailedName.BAD_TASK for attempt in last_attempts(group.attempts)):
            self.bad_tasks += 1
            return
        scores = [member.score for member in group.members_G]
        solved, total = sum(score.solved for score in scores), math.fsum(score.value for score in scores)
        self.tasks.append(MeasuredTask(group.task.level, group.task.source, len(scores), solved, total))
        self.missing += self.samples_per_task - len(scores)
        self.retries += len(group.attempts) - self.samples_per_task
        self.outcomes.update(str(attempt.outcome.name) for attempt in last_attempts(group.attempts))
        if self.prices is not None:
            self.cost += math.fsum(self.prices.cost_of(attempt) for attempt in group.attempts)
        for member in group.members_G:
            self.sums.update(spent(member.attempt))

    @property
    def samples(self) -> int:
        """How many samples were judged."""
        return sum(task.samples for task in self.tasks)

    @property
    def complete(self) -> bool:
        """Whether there is a task, and every sample of every task was judged."""
        return bool(self.tasks) and not self.missing

    def pass_at(self, k: int, tasks: Iterable[MeasuredTask] | None = None) -> Estimate | None:
        """pass@k of `tasks`, or of all; None where none of them has k samples."""
        return pass_at(self.tasks if tasks is None else tasks, k)

    def mean_score(self, tasks: Iterable[MeasuredTask] | None = None) -> float | None:
        """The mean score of `tasks`, or of all. Tasks have equal weight, as in `pass_at`. None where no sample was
        judged."""
        return mean_score(self.tasks if tasks is None else tasks)

    @property
    def least_accuracy(self) -> float:
        """The accuracy if every missing sample were a wrong answer."""
        shares = [task.correct / self.samples_per_task for task in self.tasks]
        return math.fsum(shares) / len(shares) if shares else 0.0

    def mean(self, name: str) -> float:
        """The mean of one of SPENT over judged samples."""
        return self.sums[name] / self.samples if self.samples else 0.0

    def metrics(self) -> dict[str, float]:
        """Flat names and finite numbers, for metrics.json and Weights & Biases. Shares without a judged sample are
        left out."""
        metrics: dict[str, float] = {}
        for k in sizes_of_k(self.samples_per_task):
            _add(metrics, f"eval/pass@{k}", self.pass_at(k))
        _add(metrics, "eval/accuracy", self.pass_at(1))
        if (mean := self.mean_score()) is not None:
            metrics["eval/score_mean"] = mean
        if self.missing:
            metrics["eval/accuracy_missing_wrong"] = self.least_accuracy
        for part in ("level", "source"):
            for label, tasks in by_part(self.tasks, part).items():
                _add(metrics, f"eval/accuracy_{part}_{label}", self.pass_at(1, tasks))
        metrics |= {
            "eval/tasks": len(self.tasks),
            "eval/samples": self.samples,
            "eval/samples_missing": self.missing,
            "eval/bad_tasks": self.bad_tasks,
            "eval/retries": self.retries,
        }
        metrics |= {f"eval/outcome_{name}": count for name, count in sorted(self.outcomes.items())}
        metrics |= {f"eval/{name}": self.mean(name) for name in SPENT} if self.samples else {}
        return metrics | ({"eval/cost": self.cost} if self.prices is not None else {})


def spent(attempt: Attempt) -> dict[str, float]:
    """Steps, tokens and times of one attempt, by the names in SPENT."""
    record = attempt.record
    return {
        "steps": record.action_steps,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.sampled_tokens,
        "duration_s": record.duration_s,
        "waiting_s": record.waiting_s,
    }


def _add(metrics: dict[str, float], name: str, estimate: Estimate | None) -> None:
    if estimate is not None:
        metrics |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
