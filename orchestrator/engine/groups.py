"""Begins one group after the other, so that no sandbox is idle, and yields them as they end."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Iterator

from orchestrator.engine.draws import Draw, Pause
from orchestrator.engine.group import Unfinished
from orchestrator.engine.one_group import GroupMaker
from orchestrator.rules.waits import first_error, uninterrupted
from orchestrator.run.earlier import Earlier
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.types import BadTask, Group, Task

log = logging.getLogger(__name__)

READY_GROUPS = 16  # finished groups not taken yet; with more, rollouts wait


def open_groups(settings: RolloutSettings, sandboxes: int) -> int:
    """How many groups may be open. auto: one more than sandboxes, as each of these may run the last rollout of
    another group."""
    return sandboxes + 1 if settings.max_open_groups is None else settings.max_open_groups


class GroupStream:
    """The groups of one call. `earlier`: what an earlier process did; its groups do not come again."""

    def __init__(self, maker: GroupMaker, draws: Iterator[Draw | Pause], earlier: Earlier) -> None:
        self._maker = maker
        self._draws = draws
        self._earlier = earlier
        self._executor = maker.executor(earlier)
        self._executor.settled = self._wake
        self._ended: asyncio.Queue[Group | BaseException | None] = asyncio.Queue(READY_GROUPS)
        self._room = asyncio.Event()  # there may be room for another group
        self._open = 0  # groups under way
        self._unfinished = False
        self._more = True

    def _wake(self) -> None:
        self._room.set()

    async def groups(self) -> AsyncGenerator[Group, None]:
        """Closing the generator cancels what runs, and returns when sandboxes are removed and attempts
        recorded."""
        listening = True

        async def produce() -> None:
            end: BaseException | None = None
            try:
                await self._produce()
            except BaseExceptionGroup as errors:
                end = first_error(errors)
            except Exception as error:  # before the first group; the consumer below waits for it
                end = error
            if listening:
                await self._ended.put(end)

        producer = asyncio.create_task(produce(), name="groups")
        try:
            while (group := await self._ended.get()) is not None:
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            listening = False
            producer.cancel()
            # Until sandboxes are removed and attempts recorded, nothing that these need may be closed.
            await uninterrupted(asyncio.wait([producer]))
            if not producer.cancelled() and (error := producer.exception()) is not None:
                log.debug("group producer ended with %r", error)

    async def _produce(self) -> None:
        """Begins the next group as soon as no rollout waits for a slot: a free slot is always taken at once.

        Raises an exception group, with every rollout cancelled.
        """
        maker, executor = self._maker, self._executor
        config, stopping = maker.config, maker.shared.stopping

        def is_full() -> bool:
            return self._open >= open_groups(config.env, maker.hosts.capacity) or not executor.has_room()

        with maker.hosts.following(lambda: math.inf if self._more else executor.waiting, self._wake):
            async with asyncio.TaskGroup() as tg:
                # Sources read files or the network: off the event loop, one task at a time.
                while not stopping.is_set() and (draw := await self._next()):
                    if isinstance(draw, Pause):
                        await self._room.wait()  # the end of a group wakes it
                        continue
                    if isinstance(draw.task, BadTask):
                        if draw.number not in self._earlier.bad:
                            await uninterrupted(maker.observer.bad_task(draw.task, draw.number))
                        continue
                    if draw.number in self._earlier.written:
                        continue
                    size = maker.begun_at_once(draw.size or config.env.group_size)
                    with maker.hosts.expecting(config.sandbox_spec(draw.task), size):
                        while is_full():
                            self._room.clear()
                            await self._room.wait()
                    executor.begin(draw.number, size)
                    self._open += 1
                    tg.create_task(self._make(draw.task, draw), name=f"group {draw.number}")
                self._more = False
        cost_limit = maker.shared.costs.cost_limit
        if cost_limit is None or not cost_limit.is_empty:
            return
        if self._unfinished or await asyncio.to_thread(lambda: any(map(self._is_work, self._draws))):
            raise cost_limit.reached

    async def _next(self) -> Draw | Pause | None:
        self._room.clear()
        return await asyncio.to_thread(next, self._draws, None)

    async def _make(self, task: Task, draw: Draw) -> None:
        try:
            group = await self._maker.make(
                task, draw.number, draw.epoch, self._executor, again=draw.again, size=draw.size
            )
            await self._ended.put(group)
        except Unfinished:
            log.debug("group %d stays unfinished", draw.number)
            self._unfinished = True
        finally:
            self._executor.end(draw.number)
            self._open -= 1
            self._wake()

    def _is_work(self, draw: Draw | Pause) -> bool:
        """Whether a group is still to be made for it."""
        if isinstance(draw, Pause):
            return True
        return isinstance(draw.task, Task) and draw.number not in self._earlier.written
