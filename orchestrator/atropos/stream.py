"""The tasks to make groups of: round after round; tasks that came back go first."""

import asyncio
import heapq
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.engine.draws import Draws, Pause
from orchestrator.errors import ConfigError
from orchestrator.rules.pools import Pools
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import BadTask, Task

OnBadTask = Callable[[BadTask, int], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One group to make. `number` counts tasks in the stream, `epoch` earlier rounds, `returned` how often this
    group was cancelled."""

    number: int
    epoch: int = field(compare=False)
    task: Task = field(compare=False)
    returned: int = field(default=0, compare=False)


class TaskStream:
    """Numbers tasks as the engine does, so that `process` and `serve` make the same groups. `fitting`, `building`,
    `pools`: as those of `Draws`; `is_bad`: its `bad`."""

    def __init__(
        self,
        tasks: Iterable[Task | BadTask],
        is_done: Callable[[int], bool],
        bad_task: OnBadTask,
        fitting: Callable[[Task | BadTask], Task | BadTask] = lambda task: task,
        building: Callable[[Task], Future[Task | BadTask]] | None = None,
        is_bad: Callable[[int], bool] = lambda number: False,
        pools: Pools | None = None,
    ) -> None:
        self._is_done = is_done
        self._bad_task = bad_task
        self._pools = pools
        draws = Draws(fitting, building, pools)
        self._draws = draws.several(tasks, sys.maxsize, epoch=None, rounds=True, done=is_done, bad=is_bad)
        self._back: list[Item] = []
        self._reading = asyncio.Lock()

    async def next(self) -> Item:
        """The next item, as soon as it can be told. Raises ConfigError where no task can be used."""
        while (item := await self.next_now()) is None:
            assert self._pools is not None
            await self._pools.news.wait()
        return item

    async def next_now(self) -> Item | None:
        """The next item; None: that follows from results of groups under way. Raises as `next`."""
        if self._back:
            return heapq.heappop(self._back)
        async with self._reading:
            while True:
                if self._pools is not None:
                    self._pools.news.clear()
                # Sources read files or the network: off the event loop, one task at a time.
                draw = await asyncio.to_thread(next, self._draws, None)
                if draw is None:
                    raise ConfigError("env.dataset: no task of it can be used")
                if isinstance(draw, Pause):
                    return None
                if self._is_done(draw.number):
                    continue
                if isinstance(draw.task, BadTask):
                    await uninterrupted(self._bad_task(draw.task, draw.number))
                    continue
                return Item(draw.number, draw.epoch, draw.task)

    def put_back(self, item: Item) -> None:
        """Makes the item come again before new ones."""
        heapq.heappush(self._back, replace(item, returned=item.returned + 1))
