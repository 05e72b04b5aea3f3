"""Hands groups to the run-api, each at most once, through broken calls, restarts and `kill -9`.

Before a group is sent, the ledger says so on disk. If the outcome of the call is unknown, the run-api is asked for
the latest group it took. If that does not tell either, the group counts as arrived and is not sent again: a
missing group can be counted, one that is trained on twice cannot be taken back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.atropos.connection import BETWEEN_CALLS, Connection
from orchestrator.atropos.position import Ledger, Sending
from orchestrator.atropos.run_api import Registration, RunApiAway, RunApiRefused, fingerprint
from orchestrator.atropos.stream import Item
from orchestrator.errors import ConfigError

log = logging.getLogger(__name__)

LATE_S = 2.0  # a request that broke off may still arrive: from a gateway, or from the run-api's own buffer
Groups = Sequence[Mapping[str, Any]]


@dataclass(eq=False, slots=True)
class Delivery:
    """Delivers groups one after the other. `saved` writes the ledger to disk."""

    connection: Connection
    ledger: Ledger
    saved: Callable[[], Awaitable[None]]
    say: Callable[[str], None]
    uncertain: int = 0  # deliveries that may not have arrived

    async def post(self, item: Item, groups: Groups) -> bool:
        """Waits until the run-api has the groups, or may have them; False: it refused them.

        One caller at a time: otherwise it could not be found out whether a delivery that broke off arrived.
        """
        last = await asyncio.to_thread(fingerprint, groups[-1])
        attempt = 0
        sent_to: Registration | None = None
        while True:
            await self.connection.answers.wait()
            registration = self.connection.registration
            if registration is None:
                self.connection.answers.clear()
                continue
            try:
                if (broken := self.ledger.sending) is not None and await self._arrived(
                    broken, same=sent_to is registration
                ):
                    return True
                # A restarted run-api would take the group without a registration, and then be of use to no
                # trainer. Its status fails for an environment that it does not know.
                status = await self.connection.api.status(registration.env_id)
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
            attempt += 1
            await asyncio.sleep(BETWEEN_CALLS.pause_s(attempt))

    async def _send(self, groups: Groups, sending: Sending) -> None:
        """Sends after a note on disk: a process that ends in between leaves an open question, and no second
        delivery."""
        self.ledger.sending = sending
        await self.saved()
        try:
            await self.connection.api.send(groups, sending.env_id)
        except RunApiAway as error:
            if not error.arrived:
                self.ledger.sending = None
                await self.saved()
            raise

    async def settle(self, registration: Registration) -> None:
        """Finds out what became of the group that an earlier process was sending when it ended."""
        sending = self.ledger.sending
        assert sending is not None
        # Numbers and names of registrations only grow until the run-api is restarted or reset.
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
            await asyncio.sleep(BETWEEN_CALLS.pause_s(1))
        else:
            self.ledger.sending = None
            await self.saved()

    async def _arrived(self, sending: Sending, *, same: bool) -> bool:
        """Whether a delivery that broke off counts as arrived. `same`: the run-api was not restarted since."""
        if await self._heard(sending, same=same):
            return True
        await asyncio.sleep(LATE_S)
        return await self._heard(sending, same=same)

    async def _heard(self, sending: Sending, *, same: bool) -> bool:
        whose, last = await self.connection.api.latest()
        if (whose, last) == (sending.env_id, sending.fingerprint):
            return True
        if same:
            now = await self.connection.api.status(sending.env_id)
            if now.own_queued > sending.queued:
                return True
            if whose == sending.env_id or now.step == sending.step:
                return False  # its latest group is an older one of ours; or the queue neither shrank nor grew
        self.uncertain += 1
        self.say(
            f"the delivery of group {sending.number} broke off, and whether it arrived cannot be told; "
            "it is not sent again"
        )
        return True
