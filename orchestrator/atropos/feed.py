"""Keeps a trainer supplied with groups, whatever happens to it or to the run-api between.

In place of Atropos' own loop, which ends when the run-api is restarted, loses what cannot be sent at once,
throws running groups away whenever the queue is full, misses evaluations and sleeps 5 s before it begins.
Here a group that was begun is finished and delivered; only an evaluation that stops training, its own time
limit and the end of the run cancel it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from orchestrator.atropos.connection import Connection
from orchestrator.atropos.delivery import Delivery, Groups
from orchestrator.atropos.gates import Gate
from orchestrator.atropos.position import Ledger
from orchestrator.atropos.run_api import (
    Registration,
    RunApi,
    Trainer,
)
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.atropos.terms import Terms
from orchestrator.errors import OrchestratorError, RunUnhealthy
from orchestrator.group import Unfinished
from orchestrator.waits import uninterrupted

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_RETURNED = 3  # cancellations of one group; after them it is left to its end
MAX_REFUSED = 3  # refused groups in a row: the next ones would be refused as well


class Maker(Protocol):
    """What a feed needs of the environment."""

    def has_room(self, share: float) -> bool:
        """Whether no rollout waits for a sandbox, of that share of them: it is time to begin a group."""

    def begin(self, item: Item) -> None:
        """A group is begun: `make` follows."""

    async def make(self, item: Item) -> Groups:
        """The groups of one item, fit to be sent; none: it came to nothing and does not come again. May be
        cancelled at any time, and then leaves nothing behind."""

    async def registered(self, registration: Registration, trainer: Trainer) -> None:
        """A trainer is there, for the first time or again. Raises ConfigError where it cannot be served."""

    async def stepped(self, step: int) -> None:
        """The trainer has taken a step."""

    async def checkpoint(self, step: int) -> None:
        """The trainer has passed one of its checkpoints."""

    async def keep(self, item: Item, groups: Groups) -> None:
        """The groups are on disk when this returns, and are delivered next. Never cancelled."""

    async def saved(self) -> None:
        """What the ledger says is on disk when this returns."""

    async def delivered(self, item: Item) -> None:
        """The run-api has taken the item's groups. `saved` is called next."""

    async def evaluate(self, step: int) -> None:
        """An evaluation is due."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One group under way."""

    item: Item
    task: asyncio.Task[None] | None = None
    collecting: bool = True  # and so can be cancelled
    returns: bool = False  # it was cancelled to come again


class Feed:
    """One environment at one run-api. `say` is given lines for people."""

    def __init__(
        self,
        api: RunApi,
        maker: Maker,
        stream: Callable[[], TaskStream],
        ledger: Ledger,
        terms: Terms,
        say: Callable[[str], None],
    ) -> None:
        """`stream`: the tasks; another one where a registration made the run go on elsewhere."""
        self.connection = Connection(api, terms, ledger, say, maker.registered)
        self.delivery = Delivery(self.connection, ledger, maker.saved, say)
        self.maker = maker
        self.ledger = ledger
        self.terms = terms
        self.step = 0  # the trainer's
        self.cancelled = 0  # groups that were cancelled and came again
        self.refused = 0
        self.unsent = 0  # finished, and the run ended before the run-api took them
        self._stream = stream
        self._say = say
        self._changed = asyncio.Event()
        self._workers: set[_Worker] = set()
        self._sending = asyncio.Lock()
        self._refused_running = 0
        self._draining = False
        self._evaluation: asyncio.Task[None] | None = None
        self._eval_due = False

    async def run(self) -> None:
        """Until `terms.total` groups are delivered, `drain`, or what stops a run is raised."""
        try:
            async with asyncio.TaskGroup() as tg:
                await self._loop(tg)
                for worker in self._workers:
                    if worker.task is not None:
                        worker.task.cancel()
        finally:
            await uninterrupted(self.connection.disconnect())

    def drain(self) -> None:
        """No group is begun any more; those under way come to their end."""
        self._draining = True
        self._changed.set()

    def wake(self) -> None:
        """There may be room for another group."""
        self._changed.set()

    @property
    def queued(self) -> int:
        """Groups that waited for the trainer when the run-api was asked last, others' included."""
        status = self.connection.status
        return status.queued if status is not None else 0

    @property
    def under_way(self) -> int:
        """Groups begun and not delivered."""
        return len(self._workers)

    @property
    def begins_more(self) -> bool:
        """Whether there are groups still to be begun."""
        left = None if self.terms.total is None else self.terms.total - self.ledger.groups
        return not self._draining and (left is None or left > len(self._workers))

    @property
    def finished(self) -> bool:
        """Whether everything asked for was delivered."""
        return self.terms.total is not None and self.ledger.groups >= self.terms.total

    # ------------------------------------------------------------ the loop

    async def _loop(self, tg: asyncio.TaskGroup) -> None:
        evals = Gate(self.terms.steps_per_eval, 0)
        checkpoints = Gate(0, 0)
        connection = self.connection
        while not self.finished and not (self._draining and not self._workers):
            if connection.registration is None:
                await self._until_changed(connection.register())
                if connection.registration is None:
                    continue
                self.step = connection.registration.step
                evals = Gate(self.terms.steps_per_eval, self.step)
                checkpoints = Gate(connection.registration.checkpoint_interval, self.step)
            await self._until_changed(connection.ask())
            status, registration = connection.status, connection.registration
            if status is None or registration is None or not connection.answers.is_set():
                continue
            if self.ledger.sending is not None and not self._workers:
                await self._until_changed(self.delivery.settle(registration))
                continue
            if status.step != self.step:
                self.step = status.step
                await self.maker.stepped(self.step)
                if (reached := checkpoints.due(self.step)) is not None:
                    await self.maker.checkpoint(reached)
                self._eval_due |= evals.due(self.step) is not None
            self._evaluate(tg)
            await self._open(tg)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    async def _until_changed(self, wait: Awaitable[None]) -> None:
        """Waits for it, but not past a `drain`."""
        task = asyncio.ensure_future(wait)
        try:
            while not task.done():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if self.finished or (self._draining and not self._workers):
                    break
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _open(self, tg: asyncio.TaskGroup) -> None:
        """Begins groups while there is room for them."""
        while (
            not self._draining
            and len(self._workers) < self._room()
            and (share := self._share()) > 0
            and self.maker.has_room(share)
        ):
            item = await self._stream().next()
            worker = _Worker(item)
            self._workers.add(worker)
            self.maker.begin(item)
            worker.task = tg.create_task(self._work(worker), name=f"group {item.number}")

    def _room(self) -> int:
        """How many groups may be under way: workers, the off-policy bound, what is left to do."""
        room = min(self.terms.workers, self.connection.bound())
        if self.terms.total is not None:
            room = min(room, self.terms.total - self.ledger.groups)
        return room

    def _share(self) -> float:
        """Of the sandboxes, what training may have."""
        evaluating = self._evaluation is not None and not self._evaluation.done()
        if not evaluating:
            return 1.0
        return 0.0 if self.terms.stop_for_eval else self.terms.share_in_eval

    # ------------------------------------------------------------ one group

    async def _work(self, worker: _Worker) -> None:
        """From the task to the delivery. What it raises ends the run."""
        try:
            groups = await self._collect(worker)
            worker.collecting = False
            if groups:
                await uninterrupted(self.maker.keep(worker.item, groups))
                self.unsent += 1
                await self._deliver(worker.item, groups)
            elif groups is not None:
                self.ledger.drop(worker.item.number)
        except Unfinished:
            log.debug("group %d stays unfinished", worker.item.number)
        except asyncio.CancelledError:
            if not worker.returns:
                raise
            self.cancelled += 1
            self._stream().put_back(worker.item)
        finally:
            self._workers.discard(worker)
            self._changed.set()

    async def _collect(self, worker: _Worker) -> Groups | None:
        """None: it took too long, and comes again unless it did so too often."""
        item = worker.item
        limit_s = self.terms.time_limit_s(item.task)
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self.maker.make(item)
        except TimeoutError:
            if not limit.expired():
                raise
        if item.returned < MAX_RETURNED:
            self._say(f"group {item.number} took longer than {limit_s:.0f} s and comes again")
            self.cancelled += 1
            self._stream().put_back(item)
            return None
        self._say(f"group {item.number} took too long {MAX_RETURNED + 1} times and is given up")
        return ()

    async def _deliver(self, item: Item, groups: Groups) -> None:
        """Until the run-api has them or refuses them."""
        async with self._sending:
            posted = await self.delivery.post(item, groups)
            self.unsent -= 1
            if posted:
                self.ledger.deliver(item.number, len(groups))
                self.connection.sent_since += len(groups)
                await self.maker.delivered(item)
            else:
                self.refused += 1
                self.ledger.drop(item.number)
            self._refused_running = 0 if posted else self._refused_running + 1
            await self.maker.saved()
        if self._refused_running >= MAX_REFUSED:
            raise RunUnhealthy(
                f"the run-api at {self.connection.api.url} refuses one group after the other; see above"
            )

    # ------------------------------------------------------------ evaluations

    def _evaluate(self, tg: asyncio.TaskGroup) -> None:
        """Begins one that is due, when the one before is over."""
        if not self._eval_due or self._draining or (self._evaluation is not None and not self._evaluation.done()):
            return
        self._eval_due = False
        stopped = []
        if self.terms.stop_for_eval:
            stopped = [w for w in self._workers if w.collecting and w.item.returned < MAX_RETURNED]
        going = [worker.task for worker in stopped if worker.task is not None]
        for worker in stopped:
            worker.returns = True
        for task in going:
            task.cancel()
        self._evaluation = tg.create_task(
            self._evaluated(self.step, going), name=f"evaluation at step {self.step}"
        )

    async def _evaluated(self, step: int, going: Sequence[asyncio.Task[None]]) -> None:
        """Once what was stopped for it has given its sandboxes back."""
        try:
            if going:
                await asyncio.wait(going)
            await self.maker.evaluate(step)
        except OrchestratorError as error:
            self._say(f"the evaluation at step {step} failed: {error}")
        finally:
            self._changed.set()
