"""Keeps a trainer supplied with groups, whatever happens to it or to the run-api between them.

This replaces Atropos' own loop, which ends when the run-api is restarted, loses what cannot be sent at once,
throws running groups away whenever the queue is full, misses evaluations and sleeps 5 s before it begins.
Here a group that was begun is finished and delivered. It is cancelled only by an evaluation that stops
training, by its own time limit, or by the end of the run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from orchestrator.atropos.connection import Connection
from orchestrator.atropos.delivery import Delivery, Groups
from orchestrator.atropos.position import Ledger
from orchestrator.atropos.run_api import Registration, RunApi, Trainer
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.atropos.terms import Terms
from orchestrator.engine.group import Unfinished
from orchestrator.errors import OrchestratorError, RunUnhealthy
from orchestrator.rules.waits import uninterrupted

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_RETURNED = 3  # how often a group comes again; then no evaluation cancels it, and its time limit ends it
MAX_REFUSED = 3  # refused groups in a row: the next ones would be refused as well


class Maker(Protocol):
    """What a feed needs of the environment."""

    def has_room(self, share: float) -> bool:
        """Whether all begun rollouts fit into that share of the sandboxes: then it is time to begin a group."""

    def begin(self, item: Item) -> None:
        """A group is begun: `make` follows."""

    async def make(self, item: Item) -> Groups:
        """The groups of one item, fit to be sent; none: the item gave nothing and does not come again. May be
        cancelled at any time, and then leaves no sandbox behind."""

    async def given_up(self, item: Item) -> None:
        """The item took too long too often: no group comes of it."""

    async def registered(self, registration: Registration, trainer: Trainer) -> None:
        """A trainer was found, for the first time or again. Raises ConfigError where it cannot be served."""

    async def stepped(self, step: int) -> None:
        """The trainer has taken a step."""

    async def checkpoint(self, step: int) -> None:
        """The trainer has passed one of its checkpoints."""

    async def keep(self, item: Item, groups: Groups) -> None:
        """Writes the groups to disk; they are delivered next. Never cancelled."""

    async def saved(self) -> None:
        """Writes the ledger to disk."""

    async def delivered(self, item: Item) -> None:
        """The run-api has taken the item's groups. `saved` is called next."""

    async def evaluate(self, step: int) -> None:
        """Runs the evaluation that is due."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One group under way."""

    item: Item
    task: asyncio.Task[None] | None = None
    collecting: bool = True  # still being made, so it can be cancelled
    returns: bool = False  # it was cancelled, and comes again


class Gate:
    """Due once whenever the trainer's step has entered another span of `every` steps. `every` below 1: never.

    The trainer may advance several steps between two looks. Comparing remainders, as Atropos does, then
    misses some, and never opens for `every` = 1.
    """

    def __init__(self, every: int, step: int) -> None:
        self._every = every
        self._span = self._of(step)

    def due(self, step: int) -> int | None:
        """The multiple of `every` that was reached since the last call; None: none was. After a step back,
        counting goes on from there."""
        span = self._of(step)
        reached = span > self._span
        self._span = span
        return span * self._every if reached else None

    def _of(self, step: int) -> int:
        return step // self._every if self._every > 0 else 0


class Feed:
    """Feeds one run-api from one environment. `say` gets lines for people."""

    def __init__(
        self,
        api: RunApi,
        maker: Maker,
        stream: Callable[[], TaskStream],
        ledger: Ledger,
        terms: Terms,
        say: Callable[[str], None],
    ) -> None:
        """`stream` gives the current task stream: a registration may replace it by one at another position."""
        self.connection = Connection(api, terms, ledger, say, maker.registered)
        self.delivery = Delivery(self.connection, ledger, maker.saved, say)
        self.maker = maker
        self.ledger = ledger
        self.terms = terms
        self.step = 0  # the trainer's
        self.cancelled = 0  # groups that were cancelled and came again
        self.refused = 0
        self.unsent = 0  # groups on disk that the run-api has neither taken nor refused
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
        """Feeds until `terms.total` groups are delivered or `drain` is called. Raises what stops a run."""
        try:
            async with asyncio.TaskGroup() as tg:
                await self._loop(tg)
                for worker in self._workers:
                    if worker.task is not None:
                        worker.task.cancel()
        finally:
            await uninterrupted(self.connection.disconnect())

    def drain(self) -> None:
        """Begins no more groups; those under way come to their end."""
        self._draining = True
        self._changed.set()

    def wake(self) -> None:
        """Looks now whether there is room for another group."""
        self._changed.set()

    @property
    def queued(self) -> int:
        """Groups that waited for the trainer at the last status, those of other environments included."""
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
        """Stops waiting when the feed is finished or drained."""
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
        while (
            not self._draining
            and len(self._workers) < self._room()
            and (share := self._share()) > 0
            and self.maker.has_room(share)
        ):
            if (item := await self._stream().next_now()) is None:
                return
            worker = _Worker(item)
            self._workers.add(worker)
            self.maker.begin(item)
            worker.task = tg.create_task(self._work(worker), name=f"group {item.number}")

    def _room(self) -> int:
        """How many groups may be under way, by workers, off-policy bound and what is left to do."""
        room = self.connection.bound()
        if self.terms.workers is not None:
            room = min(room, self.terms.workers)
        if self.terms.total is not None:
            room = min(room, self.terms.total - self.ledger.groups)
        return room

    def _share(self) -> float:
        """The share of the sandboxes that training may use."""
        evaluating = self._evaluation is not None and not self._evaluation.done()
        if not evaluating:
            return 1.0
        return 0.0 if self.terms.stop_for_eval else self.terms.share_in_eval

    # ------------------------------------------------------------ one group

    async def _work(self, worker: _Worker) -> None:
        """Makes and delivers the groups of one item. What it raises ends the run."""
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
        """None: it took too long, and the item comes again; empty: it took too long too often."""
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
        await uninterrupted(self.maker.given_up(item))
        return ()

    async def _deliver(self, item: Item, groups: Groups) -> None:
        """Waits until the run-api takes or refuses the groups. Raises RunUnhealthy."""
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
        """Begins a due evaluation when the one before is over."""
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
        """Evaluates, after the groups stopped for it have given their sandboxes back."""
        try:
            if going:
                await asyncio.wait(going)
            await self.maker.evaluate(step)
        except OrchestratorError as error:
            self._say(f"the evaluation at step {step} failed: {error}")
        finally:
            self._changed.set()
