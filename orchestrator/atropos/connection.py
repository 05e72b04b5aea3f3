"""Our registration at the run-api, renewed when the run-api was restarted, and its last status."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from orchestrator.atropos.position import Ledger
from orchestrator.atropos.run_api import Registration, RunApi, RunApiAway, RunApiRefused, Status, Trainer
from orchestrator.atropos.terms import Terms, check_batch_size
from orchestrator.errors import ConfigError
from orchestrator.rules.backoff import Backoff

BETWEEN_CALLS = Backoff(first_s=0.2, most_s=2.0)  # pauses while the run-api gives no answer
DISCONNECT_S = 3.0
UNKNOWN = 3  # after so many answers 500 in a row the run-api does not know us any more
_ITS_OWN_FAILURE = 500  # from the run-api itself; other codes are those of a gateway in front of it


@dataclass(eq=False, slots=True)
class Connection:
    """One environment's place at one run-api. `registered` is called with each new registration."""

    api: RunApi
    terms: Terms
    ledger: Ledger
    say: Callable[[str], None]
    registered: Callable[[Registration, Trainer], Awaitable[None]]
    registration: Registration | None = None
    status: Status | None = None  # the last one
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # set while registered and the run-api answers
    sent_since: int = 0  # groups handed over since `status` was asked for
    _batch: int = 0  # sequences in a batch of the trainer
    _step: int = 0  # the trainer's last known step

    async def register(self) -> None:
        """Waits for a run-api with a trainer, and registers. Raises ConfigError where it cannot be served."""
        last_line, attempt = "", 0
        while True:
            try:
                registration = await self.api.register(self.terms)
                # Asked after the registration: a trainer that came between the two calls would else be missed.
                trainer = await self.api.trainer() if registration is not None else None
                why = f"waiting for a trainer at {self.api.url}"
            except RunApiAway as error:
                registration = trainer = None
                why = f"waiting for the run-api: {error}"
            except RunApiRefused as error:
                raise ConfigError(f"env.rollout_server_url: {error}") from error
            if registration is not None and trainer is not None and await self._accept(registration, trainer):
                return
            if registration is None and why != last_line:
                self.say(why)
                last_line = why
            attempt += 1
            await asyncio.sleep(min(BETWEEN_CALLS.pause_s(attempt), 0.5))

    async def _accept(self, registration: Registration, trainer: Trainer) -> bool:
        """False: the run-api went away again. Raises ConfigError."""
        batch = trainer.batch_size or self.terms.batch_size
        if batch is None:
            raise ConfigError("env.batch_size: the trainer does not say how large its batches are; set it here")
        check_batch_size(batch, self.terms.group_size)
        self._batch = batch
        try:
            await self.registered(registration, trainer)
        except RunApiAway:
            return False
        self.registration, self.status, self.sent_since = registration, None, 0
        self._step = registration.step
        self.say(f"registered as {registration.name}; the trainer is at step {registration.step}")
        return True

    async def ask(self) -> None:
        """Asks for the status until it comes, or until it is clear that this run-api does not know us."""
        registration, attempt, unknown = self.registration, 0, 0
        assert registration is not None
        while True:
            posted, self.sent_since = self.ledger.posted, 0
            try:
                status = await self.api.status(registration.env_id)
            except RunApiRefused as error:
                raise ConfigError(f"env.rollout_server_url: {error}") from error
            except RunApiAway as error:
                if attempt == 0:
                    self.answers.clear()
                unknown = unknown + 1 if error.status == _ITS_OWN_FAILURE else 0
                if unknown >= UNKNOWN:
                    return self._forgotten("it does not know this environment any more")
                if attempt == UNKNOWN and not unknown:
                    self.say(f"{error}; groups under way go on and are kept until it is back")
                attempt += 1
                await asyncio.sleep(BETWEEN_CALLS.pause_s(attempt))
                continue
            if status.step < self._step:
                return self._forgotten(f"its step went back from {self._step} to {status.step}")
            formed = status.step - self._step
            self.status, self._step = status, status.step
            self.ledger.seen_queue(status.own_queued, posted, formed, self._batch // self.terms.group_size)
            self.answers.set()
            return None

    def _forgotten(self, why: str) -> None:
        """The run-api was restarted or reset: what waited in it is gone, and we register again."""
        gone = self.ledger.forgotten()
        self.answers.clear()
        self.registration = self.status = None
        lost = f"; up to {gone} groups that waited there are lost to the trainer" if gone else ""
        self.say(f"the run-api was restarted or reset ({why}){lost}; registering again")

    def bound(self) -> int:
        """How many groups may still be added to those that wait for the trainer."""
        status, terms = self.status, self.terms
        if status is None:
            return 0
        batch, size, ahead = self._batch, terms.group_size, terms.max_batches
        share = min(1.0, status.unallocated + (terms.allocation or 0.0))
        bound = ahead * int(batch * share) // size - status.queued
        if terms.allocation is not None:
            # This environment's own part of the batches, however many groups of others are in the queue.
            bound = max(bound, math.ceil(terms.allocation * batch * ahead / size) - status.own_queued)
        return bound - self.sent_since

    async def disconnect(self) -> None:
        """An environment that stays registered has its part in every batch, and may hold up all batches."""
        if self.registration is None:
            return
        with suppress(RunApiAway, RunApiRefused, TimeoutError):
            async with asyncio.timeout(DISCONNECT_S):
                await self.api.disconnect(self.registration.env_id)
