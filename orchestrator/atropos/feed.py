"""Keeps a trainer supplied with groups, whatever happens to it or to the run-api between.

In place of Atropos' own loop, which ends when the run-api is restarted, loses what cannot be sent at once,
throws running groups away whenever the queue is full, misses evaluations and sleeps 5 s before it begins.
Here a group that was begun is finished and delivered; only an evaluation that stops training, its own time
limit and the end of the run cancel it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.atropos.gates import Gate
from orchestrator.atropos.position import Ledger, Sending
from orchestrator.atropos.run_api import (
    Registration,
    RunApi,
    RunApiAway,
    RunApiRefused,
    Status,
    Trainer,
    fingerprint,
)
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.errors import ConfigError, OrchestratorError, RunUnhealthy
from orchestrator.group import Unfinished
from orchestrator.waits import uninterrupted

log = logging.getLogger(__name__)

POLL_S = 0.2
PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # between two calls of a run-api that gives no answer; the last again and again
LATE_S = 2.0  # what broke off may still be on its way: in a gateway, or read by the run-api and not looked at
DISCONNECT_S = 3.0
MAX_RETURNED = 3  # cancellations of one group; after them it is left to its end
MAX_REFUSED = 3  # refused groups in a row: the next ones would be refused as well
UNKNOWN = 3  # answers 500 in a row that mean: it does not know us
_ITS_OWN_FAILURE = 500  # other codes are those of a gateway before it, and say nothing of what it knows

Groups = Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True, slots=True)
class Terms:
    """How to feed. `workers`: groups that may be under way. `total`: groups to deliver; None: no end.

    `share_in_eval`: of the sandboxes, for training while an evaluation is under way.
    """

    name: str
    group_size: int
    max_token_length: int
    workers: int
    worker_timeout_s: float
    total: int | None = None
    batch_size: int | None = None
    max_batches: int = 3
    weight: float = 1.0
    allocation: float | None = None
    steps_per_eval: int = 0
    stop_for_eval: bool = True
    share_in_eval: float = 0.0


@dataclass(slots=True, eq=False)
class _Worker:
    """One group under way."""

    item: Item
    task: asyncio.Task[None] | None = None
    collecting: bool = True  # and so can be cancelled
    returns: bool = False  # it was cancelled to come again


@dataclass(slots=True)
class Feed:
    """One environment at one run-api. `say` is given lines for people."""

    api: RunApi
    maker: Maker
    stream: TaskStream
    ledger: Ledger
    terms: Terms
    say: Callable[[str], None]
    step: int = 0
    cancelled: int = 0  # groups that were cancelled and came again
    refused: int = 0
    uncertain: int = 0  # deliveries that may not have arrived
    unsent: int = 0  # finished, and the run ended before the run-api took them
    outages: int = 0
    _registration: Registration | None = None
    _there: asyncio.Event = field(default_factory=asyncio.Event)  # registered, and it answers
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _workers: set[_Worker] = field(default_factory=set)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _status: Status | None = None
    _sent_since: int = 0  # groups handed over since `_status` was asked for
    _trainer: Trainer | None = None
    _refused_running: int = 0
    _draining: bool = False
    _evaluation: asyncio.Task[None] | None = None
    _eval_due: bool = False

    async def run(self) -> None:
        """Until `terms.total` groups are delivered, `drain`, or what stops a run is raised."""
        try:
            async with asyncio.TaskGroup() as tg:
                await self._loop(tg)
                for worker in self._workers:
                    if worker.task is not None:
                        worker.task.cancel()
        finally:
            if self._registration is not None:
                await uninterrupted(self._disconnect(self._registration))

    async def _disconnect(self, registration: Registration) -> None:
        """One that stays registered has its weight in every batch, and may hold them all up."""
        with suppress(RunApiAway, RunApiRefused, TimeoutError):
            async with asyncio.timeout(DISCONNECT_S):
                await self.api.disconnect(registration.env_id)

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
        return self._status.queued if self._status is not None else 0

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
        while not self.finished and not (self._draining and not self._workers):
            if self._registration is None:
                await self._until_changed(self._register())
                if self._registration is None:
                    continue
                self.step = self._registration.step
                evals = Gate(self.terms.steps_per_eval, self.step)
                checkpoints = Gate(self._registration.checkpoint_interval, self.step)
            await self._until_changed(self._ask())
            if self._status is None or not self._there.is_set():
                continue
            if self.ledger.sending is not None and not self._workers:
                await self._until_changed(self._settle(self._registration))
                continue
            if self._status.step != self.step:
                self.step = self._status.step
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
            item = await self.stream.next()
            worker = _Worker(item)
            self._workers.add(worker)
            self.maker.begin(item)
            worker.task = tg.create_task(self._work(worker), name=f"group {item.number}")

    def _room(self) -> int:
        """How many groups may be under way: workers, the off-policy bound, what is left to do."""
        room = min(self.terms.workers, self._bound())
        if self.terms.total is not None:
            room = min(room, self.terms.total - self.ledger.groups)
        return room

    def _share(self) -> float:
        """Of the sandboxes, what training may have."""
        evaluating = self._evaluation is not None and not self._evaluation.done()
        if not evaluating:
            return 1.0
        return 0.0 if self.terms.stop_for_eval else self.terms.share_in_eval

    def _bound(self) -> int:
        """Groups that may still be added to what waits for the trainer."""
        status, batch = self._status, self._batch_size()
        if status is None or batch is None:
            return 0
        size, ahead = self.terms.group_size, self.terms.max_batches
        share = min(1.0, status.unallocated + (self.terms.allocation or 0.0))
        bound = ahead * int(batch * share) // size - status.queued
        if self.terms.allocation is not None:
            # Its own part of the batches, however full of others' groups the queue is.
            bound = max(bound, math.ceil(self.terms.allocation * batch * ahead / size) - status.own_queued)
        return bound - self._sent_since

    def _batch_size(self) -> int | None:
        told = self._trainer.batch_size if self._trainer is not None else None
        return told if told is not None else self.terms.batch_size

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
            self.stream.put_back(worker.item)
        finally:
            self._workers.discard(worker)
            self._changed.set()

    async def _collect(self, worker: _Worker) -> Groups | None:
        """None: it took too long, and comes again unless it did so too often."""
        item = worker.item
        try:
            async with asyncio.timeout(self.terms.worker_timeout_s) as limit:
                return await self.maker.make(item)
        except TimeoutError:
            if not limit.expired():
                raise
        if item.returned < MAX_RETURNED:
            self.say(f"group {item.number} took longer than {self.terms.worker_timeout_s:.0f} s and comes again")
            self.cancelled += 1
            self.stream.put_back(item)
            return None
        self.say(f"group {item.number} took too long {MAX_RETURNED + 1} times and is given up")
        return ()

    async def _deliver(self, item: Item, groups: Groups) -> None:
        """Until the run-api has them or refuses them."""
        async with self._sending:
            posted = await self._post(item, groups)
            self.unsent -= 1
            if posted:
                self.ledger.deliver(item.number, len(groups))
                self._sent_since += len(groups)
                await self.maker.delivered(item)
            else:
                self.refused += 1
                self.ledger.drop(item.number)
            self._refused_running = 0 if posted else self._refused_running + 1
            await self.maker.saved()
        if self._refused_running >= MAX_REFUSED:
            raise RunUnhealthy(f"the run-api at {self.api.url} refuses one group after the other; see above")

    async def _post(self, item: Item, groups: Groups) -> bool:
        """False: refused. One at a time, so that it can be told whether one that broke off arrived."""
        last = await asyncio.to_thread(fingerprint, groups[-1])
        attempt = 0
        sent_to: Registration | None = None
        while True:
            await self._there.wait()
            registration = self._registration
            if registration is None:
                self._there.clear()
                continue
            try:
                if (broken := self.ledger.sending) is not None and await self._arrived(
                    broken, same=sent_to is registration
                ):
                    return True
                # A run-api that was restarted takes groups of anybody, and no trainer after that.
                status = await self.api.status(registration.env_id)
                sending = Sending(
                    number=item.number,
                    lines=len(groups),
                    fingerprint=last,
                    env_id=registration.env_id,
                    name=registration.name,
                    step=status.step,
                    queued=status.own_queued,
                )
                sent_to = registration
                await self._send(groups, sending)
                return True
            except RunApiRefused as error:
                self.say(f"group not taken: {error}")
                return False
            except RunApiAway as error:
                log.info("not delivered yet: %s", error)
            await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
            attempt += 1

    async def _send(self, groups: Groups, sending: Sending) -> None:
        """Said on disk first: a process that ends in the middle leaves a question, and no second delivery."""
        self.ledger.sending = sending
        await self.maker.saved()
        try:
            await self.api.send(groups, sending.env_id)
        except RunApiAway as error:
            if not error.arrived:
                self.ledger.sending = None
                await self.maker.saved()
            raise

    async def _settle(self, registration: Registration) -> None:
        """What an earlier process was sending when it ended."""
        sending = self.ledger.sending
        assert sending is not None
        # Numbers and names of registrations count up until a run-api is restarted or reset.
        same = (
            registration.env_id > sending.env_id
            and registration.name != sending.name
            and registration.step >= sending.step
        )
        try:
            if await self._arrived(sending, same=same):
                self.ledger.deliver(sending.number, sending.lines)
        except RunApiRefused as error:
            raise ConfigError(f"env.rollout_server_url: {error}") from error
        except RunApiAway as error:
            log.info("not known yet whether group %d arrived: %s", sending.number, error)
            await asyncio.sleep(PAUSES_S[0])
        else:
            self.ledger.sending = None
            await self.maker.saved()

    async def _arrived(self, sending: Sending, *, same: bool) -> bool:
        """Whether a delivery that broke off reached the run-api, `same`: still the one it was sent to. Where that
        cannot be told, it is taken for arrived: a group that is missing can be counted, one that is trained on
        twice cannot be taken back."""
        if await self._heard(sending, same=same):
            return True
        await asyncio.sleep(LATE_S)
        return await self._heard(sending, same=same)

    async def _heard(self, sending: Sending, *, same: bool) -> bool:
        whose, last = await self.api.latest()
        if (whose, last) == (sending.env_id, sending.fingerprint):
            return True
        if same:
            now = await self.api.status(sending.env_id)
            if now.own_queued > sending.queued:
                return True
            if whose == sending.env_id or now.step == sending.step:
                return False  # an older one of ours was the last; or nothing was taken out, and it is not in it
        self.uncertain += 1
        self.say(
            f"the delivery of group {sending.number} broke off, and whether it arrived cannot be told; "
            "it is not sent again"
        )
        return True

    # ------------------------------------------------------------ the run-api

    async def _register(self) -> None:
        """Waits for a run-api with a trainer. Raises ConfigError where that trainer cannot be served."""
        terms, told, attempt = self.terms, "", 0
        while True:
            try:
                registration = await self.api.register(
                    name=terms.name,
                    max_token_length=terms.max_token_length,
                    weight=terms.weight,
                    group_size=terms.group_size,
                    allocation=terms.allocation,
                )
                # Behind the registration: asked before, a trainer that comes in between would be there unknown.
                trainer = await self.api.trainer() if registration is not None else None
                why = f"waiting for a trainer at {self.api.url}"
            except RunApiAway as error:
                registration = trainer = None
                why = f"waiting for the run-api: {error}"
            except RunApiRefused as error:
                raise ConfigError(f"env.rollout_server_url: {error}") from error
            if registration is not None and trainer is not None and await self._accept(registration, trainer):
                return
            if registration is None and why != told:
                self.say(why)
                told = why
            await asyncio.sleep(min(PAUSES_S[min(attempt, len(PAUSES_S) - 1)], 0.5))
            attempt += 1

    async def _accept(self, registration: Registration, trainer: Trainer) -> bool:
        """False: the run-api went away again."""
        batch = trainer.batch_size or self.terms.batch_size
        if batch is None:
            raise ConfigError("env.batch_size: the trainer does not say how large its batches are; set it here")
        check_batch_size(batch, self.terms.group_size)
        self._trainer = trainer
        try:
            await self.maker.registered(registration, trainer)
        except RunApiAway:
            return False
        self._registration, self._status, self._sent_since = registration, None, 0
        self.say(f"registered as {registration.name}; the trainer is at step {registration.step}")
        return True

    async def _ask(self) -> None:
        """Asks for the status until it comes, or until it is clear that this run-api does not know us."""
        registration, attempt, unknown = self._registration, 0, 0
        assert registration is not None
        while True:
            posted, self._sent_since = self.ledger.posted, 0
            try:
                self._status = await self.api.status(registration.env_id)
            except RunApiRefused as error:
                raise ConfigError(f"env.rollout_server_url: {error}") from error
            except RunApiAway as error:
                if attempt == 0:
                    self._there.clear()
                unknown = unknown + 1 if error.status == _ITS_OWN_FAILURE else 0
                if unknown >= UNKNOWN:
                    return self._forgotten("it does not know this environment any more")
                if attempt == UNKNOWN and not unknown:
                    self.outages += 1
                    self.say(f"{error}; groups under way go on and are kept until it is back")
                await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                attempt += 1
                continue
            if self._status.step < self.step:
                return self._forgotten(f"its step went back from {self.step} to {self._status.step}")
            self.ledger.seen_queue(self._status.own_queued, posted)
            self._there.set()
            return None

    def _forgotten(self, why: str) -> None:
        """It was restarted or reset: registers again. What waited in it is gone."""
        gone = self.ledger.forgotten()
        self._there.clear()
        self._registration = self._status = None
        self.outages += 1
        lost = f"; up to {gone} groups that waited there are lost to the trainer" if gone else ""
        self.say(f"the run-api was restarted or reset ({why}){lost}; registering again")

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
            self.say(f"the evaluation at step {step} failed: {error}")
        finally:
            self._changed.set()


def check_batch_size(batch_size: int, group_size: int) -> None:
    """Raises ConfigError where the run-api could never make a batch of whole groups."""
    if batch_size % group_size:
        below = max((n for n in range(1, group_size) if batch_size % n == 0), default=1)
        raise ConfigError(
            f"env.group_size: groups of {group_size} never fill the trainer's batches of {batch_size}; set "
            f"--env.group_size {below}, or the trainer's batch size to a multiple of {group_size}"
        )
