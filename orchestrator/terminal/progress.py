"""Lines for logs and pipes on a run under way."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from orchestrator.rules.observer import Listener
from orchestrator.rules.text import one_line, printable
from orchestrator.run.tally import TASK_CHARS, Tally
from orchestrator.terminal.bar import LINE_EVERY_S, span
from orchestrator.terminal.closing import lost
from orchestrator.types import BadTask, Group, RolloutPlan


class PlainProgress(Listener):
    """One line per group, and once a minute how long it will take, for logs and pipes. `wanted`: how many groups
    there will be; None: nobody knows."""

    def __init__(self, wanted: int | None, tally: Tally, stream: TextIO | None = None) -> None:
        self.wanted = wanted
        self._began: tuple[float, int] | None = None  # when this process began, and how many groups were done
        self._last_line_at = 0.0
        self.tally = tally
        self._stream = stream or sys.stderr

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing; LiveProgress stops its view here."""

    def say(self, text: str) -> None:
        """Prints one printable line."""
        print(printable(text), file=self._stream, flush=True)

    def group(self, group: Group) -> None:
        """A group has ended. The tally has counted it already."""
        scores = " ".join(f"{m.score.value:.2f}" for m in group.members_G)
        what = f"{scores}{lost(group)}" if group.dropped is None else f"dropped, {one_line(group.dropped)}"
        self.say(f"{self.heading(group)}  {what}")
        left, now = self.left_s(), time.monotonic()
        if left is not None and now - self._last_line_at >= LINE_EVERY_S:
            self._last_line_at = now
            self.say(f"{self.done} of {self.wanted} groups, {span(left)} left")

    @property
    def done(self) -> int:
        """Groups that are over."""
        return self.tally.groups + self.tally.dropped

    def begun(self, plan: RolloutPlan, node: str) -> None:
        if self._began is None:
            self._began = time.monotonic(), self.done
            self._last_line_at = self._began[0]

    def left_s(self) -> float | None:
        """Seconds until all groups will be done, at the speed so far; None: nobody knows."""
        if self._began is None or self.wanted is None or self.done <= self._began[1]:
            return None
        since, before = self._began
        return max(0, self.wanted - self.done) * (time.monotonic() - since) / (self.done - before)

    def heading(self, group: Group) -> str:
        """Seconds since the start, number of the group, its task."""
        done = str(self.done)
        if self.wanted is not None:
            done = f"{done:>{len(str(self.wanted))}}/{self.wanted}"
        task = printable(group.task.task_id)
        task = task if len(task) <= TASK_CHARS else task[: TASK_CHARS - 1] + "…"
        return f"[{self.tally.wall_s:7.1f} s] group {done}  {task:<{TASK_CHARS}}"

    def bad_task(self, task: BadTask) -> None:
        self.say(f"bad task {task.task_id[:80]}: {task.reason}")
