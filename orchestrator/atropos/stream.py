"""The tasks to make groups of: round after round; tasks that came back go first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import BadTask, Task

BadTaskSeen = Callable[[BadTask, int], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One group to make. `number` counts tasks in the stream, `epoch` earlier rounds, `returned` how often this
    group was cancelled."""

    number: int
    epoch: int = field(compare=False)
    task: Task = field(compare=False)
    returned: int = field(default=0, compare=False)


class TaskStream:
    """Numbers tasks as the engine does, so that `process` and `serve` make the same groups. `fitting`: as
    `GroupMaker.fitting`."""

    def __init__(
        self,
        tasks: Iterable[Task | BadTask],
        is_done: Callable[[int], bool],
        bad_task: BadTaskSeen,
        fitting: Callable[[Task | BadTask], Task | BadTask] = lambda task: task,
    ) -> None:
        self._is_done = is_done
        self._bad_task = bad_task
        self._numbered = _numbered(tasks, fitting)
        self._back: list[Item] = []
        self._reading = asyncio.Lock()

    async def next(self) -> Item:
        """The next item. Raises ConfigError where no task can be used."""
        if self._back:
            return heapq.heappop(self._back)
        async with self._reading:
            while True:
                # Sources read files or the network: off the event loop, one task at a time.
                task, number, epoch = await asyncio.to_thread(next, self._numbered)
                if self._is_done(number):
                    continue
                if isinstance(task, BadTask):
                    await uninterrupted(self._bad_task(task, number))
                    continue
                return Item(number, epoch, task)

    def put_back(self, item: Item) -> None:
        """Makes the item come again before new ones."""
        heapq.heappush(self._back, replace(item, returned=item.returned + 1))


def _numbered(
    tasks: Iterable[Task | BadTask], fitting: Callable[[Task | BadTask], Task | BadTask]
) -> Iterator[tuple[Task | BadTask, int, int]]:
    number = epoch = 0
    while True:
        good = 0
        for row in tasks:
            task = fitting(row)
            if epoch and isinstance(task, BadTask):
                continue  # reported in the first round
            yield task, number, epoch
            number += 1
            good += isinstance(task, Task)
        if not good:
            raise ConfigError("env.dataset: it has no task a group could be made of")
        epoch += 1
