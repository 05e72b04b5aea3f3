"""Which groups a call asks for: numbers and epochs that no two calls of an orchestrator share.

A rollout's id comes from its group's number, its seed from the run's seed, the task's id, the epoch and its
place. So a task that comes again, in the same call or in a later one, has new ids and new seeds.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import index
from threading import Lock

from orchestrator.tasks.base import Source
from orchestrator.types import BadTask, Task


@dataclass(frozen=True, slots=True)
class Draw:
    """One group to make. `epoch`: the round of tasks it belongs to; `again`: how often its task came before in
    that epoch of the same call. `size`: how many rollouts; None: as many as the settings say."""

    task: Task | BadTask
    number: int
    epoch: int
    again: int = 0
    size: int | None = None


class Draws:
    """Counts on from call to call. `fitting` gives the task, or a BadTask in its place. Thread-safe."""

    def __init__(self, fitting: Callable[[Task | BadTask], Task | BadTask]) -> None:
        self._fitting = fitting
        self._numbers = itertools.count()
        self._lock = Lock()
        self._next_epoch = 0

    def once(self, tasks: Iterable[Task | BadTask], *, epoch: int | None, size: int | None) -> Iterator[Draw]:
        """Every task once. `epoch` None: one that no call has had."""
        epoch = self._begin(epoch)
        for task, again in self._read(tasks, Counter()):
            yield Draw(task, next(self._numbers), epoch, again, size)

    def several(
        self, tasks: Iterable[Task | BadTask], wanted: int, *, epoch: int | None, rounds: bool
    ) -> Iterator[Draw]:
        """At most `wanted` groups of good tasks. With `rounds` the tasks come again if there are fewer, each round
        with an epoch of its own unless it is named: the next one may be named by another call. Bad tasks come in
        the first round only."""
        good, counts = 0, Counter[str]()
        for number in itertools.count():
            round_epoch, good_before = self._begin(epoch), good
            if epoch is None:
                counts.clear()
            for task, again in self._read(tasks, counts, 0 if epoch is None else number):
                if good >= wanted:
                    return
                if number == 0 or isinstance(task, Task):
                    yield Draw(task, next(self._numbers), round_epoch, again)
                    good += isinstance(task, Task)
            if good == good_before or not rounds:
                return

    def _read(
        self, tasks: Iterable[Task | BadTask], counts: Counter[str], rounds: int = 0
    ) -> Iterator[tuple[Task | BadTask, int]]:
        """(task, how often it came before). `counts`: how often each one did; `rounds`: how often all did."""
        for row in tasks:
            task, again = self._fitting(row), rounds
            # A source has no task twice, and to count them would keep all ids in memory.
            if not isinstance(tasks, Source):
                again = counts[task.task_id]
                counts[task.task_id] += 1
            yield task, again

    def _begin(self, epoch: int | None) -> int:
        """Raises TypeError for an epoch that is no whole number: seeds follow from how it is written."""
        with self._lock:
            epoch = self._next_epoch if epoch is None else int(index(epoch))
            self._next_epoch = max(self._next_epoch, epoch + 1)
            return epoch
