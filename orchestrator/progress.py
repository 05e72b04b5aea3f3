"""What a run looks like while it goes on, and the table at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from orchestrator.types import Attempt, BadTask, Group, Member


@dataclass(slots=True)
class Tally:
    """Counts of one run. `outcomes` has every attempt once, bad tasks included."""

    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    correct: int = 0
    groups: int = 0
    dropped: int = 0
    mixed: int = 0
    attempts: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    rollout_s: float = 0.0

    def attempt(self, result: Member | Attempt) -> None:
        """Counts one attempt."""
        attempt = result.attempt if isinstance(result, Member) else result
        record = attempt.record
        self._count(str(attempt.outcome.name), record.sampled_tokens, record.cpu_s, record.duration_s)
        if isinstance(result, Member):
            self._count_score(result.score.value, result.score.parts)

    def earlier_attempt(self, line: Mapping[str, Any]) -> None:
        """Counts one line of rollouts.jsonl that an earlier process of the run has written."""
        if "index" not in line:
            return self.bad_task()
        tokens = sum(completion["completion_tokens"] for completion in line["completions"])
        self._count(line["outcome"], tokens, line["cpu_s"], line["duration_s"])
        if line["score"] is not None:
            self._count_score(line["score"], line["score_parts"])
        return None

    def earlier_group(self, scores: Sequence[float]) -> None:
        """Counts one group that an earlier process of the run has written."""
        self.groups += 1
        self.mixed += len(set(scores)) > 1

    def _count(self, outcome: str, tokens: int, cpu_s: float | None, rollout_s: float) -> None:
        self.attempts += 1
        self.outcomes[outcome] += 1
        self.tokens += tokens
        self.cpu_s += cpu_s or 0.0
        self.rollout_s += rollout_s

    def _count_score(self, score: float, parts: Mapping[str, float]) -> None:
        self.scores.append(score)
        self.correct += parts.get("correctness", 0.0) >= 1.0

    def bad_task(self) -> None:
        """Counts one row no task could be made of."""
        self.outcomes["bad_task"] += 1

    def group(self, group: Group) -> None:
        """Counts one group."""
        if group.dropped is not None:
            self.dropped += 1
            return
        self.groups += 1
        self.mixed += len({m.score.value for m in group.members_G}) > 1

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


class PlainProgress:
    """One line per group, for logs and pipes."""

    def __init__(self, wanted: int | None, stream: TextIO = sys.stderr) -> None:
        self._wanted = wanted
        self._stream = stream

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=self._stream, flush=True)

    def group(self, group: Group, tally: Tally) -> None:
        """A group came to its end."""
        done = tally.groups + tally.dropped
        of = f"/{self._wanted}" if self._wanted else ""
        task = group.task.task_id.replace("\n", " ")[:48]
        if group.dropped is not None:
            self.say(f"[{tally.wall_s:7.1f} s] group {done}{of} {task}: dropped, {group.dropped}")
            return
        scores = " ".join(f"{m.score.value:.2f}" for m in group.members_G)
        self.say(f"[{tally.wall_s:7.1f} s] group {done}{of} {task}: {scores}")

    def bad_task(self, task: BadTask) -> None:
        """A row no task could be made of."""
        self.say(f"bad task {task.task_id[:80]}: {task.reason}")


def closing_table(tally: Tally, written: list[tuple[str, Path]], stream: TextIO = sys.stdout) -> None:
    """Outcome counts, scores, wall and CPU, and where everything was written."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row("groups", f"{tally.groups} written, {tally.mixed} with mixed scores, {tally.dropped} dropped")
    counts = ", ".join(f"{name} {count}" for name, count in tally.outcomes.most_common())
    table.add_row("outcomes", counts or "none")
    if tally.scores:
        mean = sum(tally.scores) / len(tally.scores)
        table.add_row("scores", f"mean {mean:.3f}, {tally.correct} of {len(tally.scores)} rollouts correct")
    table.add_row("tokens", f"{tally.tokens} sampled")
    table.add_row("time", f"{tally.wall_s:.1f} s wall, {_per_rollout(tally)}")
    for what, path in written:
        table.add_row(what, str(path))
    console.print(table)


def _per_rollout(tally: Tally) -> str:
    if not tally.attempts:
        return "no rollout"
    cpu = tally.cpu_s / tally.attempts
    return f"{tally.rollout_s / tally.attempts:.2f} s and {cpu:.2f} CPU-s in the sandbox per rollout"
