"""How far a long computation is: a bar on a terminal, now and then a line elsewhere."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from orchestrator.terminal.console import Console

LINE_EVERY_S = 60.0

Advance = Callable[[int], None]


@contextmanager
def bar(total: int, what: str, stream: TextIO) -> Iterator[Advance]:
    """Gives a function that is told how much more of `total` is done. `what`: what is counted."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with _drawn(total, what, stream) as advance:
            yield advance
    else:
        yield _Lines(total, what, stream).advance


@contextmanager
def _drawn(total: int, what: str, stream: TextIO) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, console=Console(stream), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)


class _Lines:
    """At most one line a minute."""

    def __init__(self, total: int, what: str, stream: TextIO) -> None:
        self._total, self._what, self._stream = total, what, stream
        self._done = 0
        self._began = self._last_line_at = time.monotonic()

    def advance(self, more: int) -> None:
        self._done += more
        now = time.monotonic()
        if now - self._last_line_at >= LINE_EVERY_S and 0 < self._done < self._total:
            self._last_line_at = now
            left_s = (now - self._began) * (self._total - self._done) / self._done
            print(
                f"{self._done:,} of {self._total:,} {self._what}, {span(left_s)} left",
                file=self._stream,
                flush=True,
            )


def span(seconds: float) -> str:
    """A duration in words, rounded: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
