"""Which groups a call asks for: numbers and epochs that no two calls of an orchestrator share.

A rollout's id comes from its group's number, its seed from the run's seed, the task's id, the epoch and its
place. So a task that comes again, in the same call or in a later one, has new ids and new seeds.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from threading import Lock

from orchestrator.rules.pools import RETEST_EVERY, Pools
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


class Pause:
    """In the place of a draw: what comes next waits for the result of a group under way."""


AHEAD = 16  # draws whose images are being made, or are there and not taken yet
Number = Callable[[int], bool]  # whether the draw of this number is meant


class Draws:
    """Counts on from call to call. `fitting` gives the task, or a BadTask in its place; `building` the same for a
    task with a sandbox of its own, when the image of that is there. `pools` choose the tasks of a round: then only
    `several` is called, one at a time. Thread-safe.

    Draws are numbered in the order of the tasks. Those whose images are being made come when these are there; the
    others do not wait for them. Images are not made for draws that are `done`, nor for those that an earlier
    process of the run found `bad`: they stay it.
    """

    def __init__(
        self,
        fitting: Callable[[Task | BadTask], Task | BadTask],
        building: Callable[[Task], Future[Task | BadTask]] | None = None,
        pools: Pools | None = None,
    ) -> None:
        self._fitting = fitting
        self._building = building
        self._pools = pools
        self._numbers = itertools.count()
        self._lock = Lock()
        self._next_epoch = 0

    def once(
        self,
        tasks: Iterable[Task | BadTask],
        *,
        epoch: int | None,
        size: int | None,
        done: Number = lambda number: False,
        bad: Number = lambda number: False,
    ) -> Iterator[Draw]:
        """Every task once. `epoch` None: one that no call has had."""
        epoch = self._begin(epoch)
        drawn = (
            Draw(task, next(self._numbers), epoch, again, size) for task, again in self._read(tasks, Counter())
        )
        yield from (draw for draw in self._built(drawn, done, bad, {}) if isinstance(draw, Draw))

    def several(
        self,
        tasks: Iterable[Task | BadTask],
        wanted: int,
        *,
        epoch: int | None,
        rounds: bool,
        done: Number = lambda number: False,
        bad: Number = lambda number: False,
    ) -> Iterator[Draw | Pause]:
        """At most `wanted` groups of good tasks. With `rounds` the tasks come again if there are fewer, each round
        with an epoch of its own unless it is named: the next one may be named by another call. Bad tasks come in
        the first round only."""
        lost: dict[int, str] = {}
        yield from self._built(self._several(tasks, wanted, epoch, rounds, lost, done), done, bad, lost)

    def _several(
        self,
        tasks: Iterable[Task | BadTask],
        wanted: int,
        epoch: int | None,
        rounds: bool,
        lost: dict[int, str],
        done: Number,
    ) -> Iterator[Draw | Pause | None]:
        """As `several`. None: to go on, it must be known which of the draws so far are `lost`."""
        pools, drawn, counts, idle = self._pools, 0, Counter[str](), 0
        for number in itertools.count():
            while pools is not None and not pools.begin_round(lambda group: group in lost or done(group)):
                yield Pause()
            round_epoch, good_before, dead = self._begin(epoch), drawn - len(lost), set(lost.values())
            if epoch is None:
                counts.clear()
            for task, again in self._read(tasks, counts, 0 if epoch is None else number):
                if drawn - len(lost) >= wanted:
                    yield None
                    if drawn - len(lost) >= wanted:
                        return
                if number == 0 or (isinstance(task, Task) and task.task_id not in dead):
                    draw = Draw(task, next(self._numbers), round_epoch, again)
                    if pools is not None:
                        pools.drawn(draw.number, task.task_id if isinstance(task, Task) else None)
                    yield draw
                    drawn += isinstance(task, Task)
            yield None
            idle = idle + 1 if drawn - len(lost) == good_before else 0
            if idle == (1 if pools is None else RETEST_EVERY) or not rounds:
                return

    def _built(
        self, drawn: Iterator[Draw | Pause | None], done: Number, bad: Number, lost: dict[int, str]
    ) -> Iterator[Draw | Pause]:
        """The draws, with their images. `lost` gets number and task of those that have none."""
        coming: dict[Future[Task | BadTask], Draw] = {}

        def ready(longest_s: float | None) -> Iterator[Draw]:
            finished = wait(coming, longest_s, FIRST_COMPLETED).done
            for future in [future for future in coming if future in finished]:
                draw = coming.pop(future)
                with suppress(CancelledError):  # the run is being stopped
                    draw = replace(draw, task=future.result())
                if isinstance(draw.task, BadTask):
                    lost[draw.number] = draw.task.task_id
                yield draw

        for draw in drawn:
            while coming and (draw is None or len(coming) >= AHEAD):
                yield from ready(None)
            if draw is None:
                continue
            if isinstance(draw, Pause):  # after a None: no image is being made
                yield draw
                continue
            task = draw.task
            if isinstance(task, BadTask) or not task.has_own_sandbox or self._building is None:
                yield draw
            elif bad(draw.number):
                lost[draw.number] = task.task_id
                yield replace(draw, task=BadTask(task.task_id, "no sandbox could be made for it before"))
            elif done(draw.number):
                yield draw
            else:
                coming[self._building(task)] = draw
            yield from ready(0)
        while coming:
            yield from ready(None)

    def _read(
        self, tasks: Iterable[Task | BadTask], counts: Counter[str], rounds: int = 0
    ) -> Iterator[tuple[Task | BadTask, int]]:
        """(task, how often it came before). `counts`: how often each one did; `rounds`: how often all did."""
        pools = self._pools
        for row in tasks:
            if pools is not None and isinstance(row, Task) and not pools.takes(row.task_id):
                continue
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
