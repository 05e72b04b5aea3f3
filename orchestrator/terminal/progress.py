"""The view of a running run: plain lines for logs and pipes, on a terminal a live view."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from orchestrator.observer import Listener
from orchestrator.run.tally import TASK_CHARS, Tally
from orchestrator.terminal.closing import lost
from orchestrator.text import one_line, printable
from orchestrator.types import BadTask, Group


class PlainProgress(Listener):
    """One line per group, for logs and pipes."""

    def __init__(self, wanted: int | None, tally: Tally, stream: TextIO | None = None) -> None:
        self.wanted = wanted
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

    def heading(self, group: Group) -> str:
        """Seconds since the start, number of the group, its task."""
        done = str(self.tally.groups + self.tally.dropped)
        if self.wanted is not None:
            done = f"{done:>{len(str(self.wanted))}}/{self.wanted}"
        task = printable(group.task.task_id)
        task = task if len(task) <= TASK_CHARS else task[: TASK_CHARS - 1] + "…"
        return f"[{self.tally.wall_s:7.1f} s] group {done}  {task:<{TASK_CHARS}}"

    def bad_task(self, task: BadTask) -> None:
        self.say(f"bad task {task.task_id[:80]}: {task.reason}")


def open_progress(wanted: int | None, tally: Tally, stream: TextIO | None = None) -> PlainProgress:
    """The view that fits `stream`, as a context manager."""
    stream = stream or sys.stderr
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainProgress(wanted, tally, stream)
    from orchestrator.terminal.live import LiveProgress

    return LiveProgress(wanted, tally, stream)
