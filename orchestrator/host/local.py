"""This machine as the host that carries out plans: under a budget of sandboxes, with pauses for what is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import time
from typing import Any

from orchestrator.completion.replay import ReplayCompleter, Replayed
from orchestrator.errors import EnvironmentUnusable, ImageUnusable, RolloutError
from orchestrator.host.base import STILL_UNDER_WAY, Host, HostNow, Provision, SlotNeedless, UnderWay
from orchestrator.host.breaker import Breaker
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.host.slots import Line
from orchestrator.proxy.lease import Lease
from orchestrator.types import Attempt, Failed, FailedName, Record, RolloutPlan, SandboxSpec

log = logging.getLogger(__name__)


class LocalHost:
    """One host and all hosts of a run in one. `spec`: of the run's sandboxes, of which `warm` are kept ready.
    `graders`: sandboxes on top for what rollouts left; 0: each is graded in its rollout's own slot. `breakers`:
    the service behind failures of that name."""

    name = ""

    def __init__(
        self,
        resources: Resources,
        spec: SandboxSpec,
        *,
        max_sandboxes: int,
        warm: int = 0,
        graders: int = 0,
        breakers: Mapping[FailedName, Breaker] | None = None,
    ) -> None:
        self.resources = resources
        self.tokenizer, self.tools = resources.tokenizer, resources.tools
        self.takes_ids, self.why_text = resources.completer.takes_ids, resources.why_text
        self.capacity = max_sandboxes
        self._warm, self._graders = warm, graders
        self._grading = asyncio.Semaphore(graders) if graders else None
        self._spec = spec
        self._breakers = breakers or {}
        self._running = 0
        self._line: Line[SandboxSpec, LocalHost] = Line(self._take, LocalHost._release)

    # ------------------------------------------------------------ one attempt

    async def works(self) -> None:
        for breaker in set(self._breakers.values()):
            await breaker.passed()

    async def carry_out(
        self, plan: RolloutPlan, provision: Provision, needless: SlotNeedless = nullcontext
    ) -> Attempt:
        return await run_rollout(plan, self.resources, provision)

    async def excuses(self, failure: Failed) -> bool:
        return bool(await self.away(failure))

    async def away(self, failure: Failed) -> str:
        """The service behind this failure, if it is away now; else empty."""
        breaker = self._breakers.get(failure.name)
        return breaker.what if breaker is not None and await breaker.away() else ""

    @property
    def away_now(self) -> str:
        """The first service that is known to be away; empty: none is."""
        return next((breaker.what for breaker in set(self._breakers.values()) if breaker.is_away), "")

    # ------------------------------------------------------------ all of them

    @property
    def waiting(self) -> int:
        return self._line.waiting

    def now(self) -> Mapping[str, HostNow]:
        pool, away = self.resources.pool, {breaker.what: breaker.is_away for breaker in self._breakers.values()}
        now = HostNow(
            self.capacity,
            self._running,
            sampling=sum(lease.clock.sampling for lease in self.resources.leases),
            launcher=self.resources.launcher.now(),
            away=away,
        )
        if pool is not None:
            now = replace(
                now,
                sandboxes=pool.states(),
                claims=dict(pool.claims),
                started=pool.started,
                starting_s=pool.starting_s,
            )
        return {self.name: now}

    def under_way(self) -> Sequence[UnderWay]:
        return [
            UnderWay(lease.plan, lease.completions.turns.count, lease.clock.elapsed_s, partial(_so_far, lease))
            for lease in self.resources.leases
        ]

    async def why_unfit(self, spec: SandboxSpec) -> str | None:
        try:
            await self.resources.launcher.check_image(spec)
        except ImageUnusable as error:
            return str(error)
        except (EnvironmentUnusable, RolloutError) as error:  # the rollouts wait or fail by it, as any others
            log.debug("the image %s is not looked at now: %s", spec.image, error)
        return None

    def turn(self) -> int:
        return self._line.turn()

    @asynccontextmanager
    async def slot(self, turn: int, spec: SandboxSpec) -> AsyncIterator[Host]:
        await self._line.wait(turn, spec)
        slot = _Slot(self, self._grading, self._release)
        try:
            yield slot
        finally:
            slot.release()

    def _take(self, spec: SandboxSpec) -> LocalHost | None:
        if self._running >= self.capacity:
            return None
        self._running += 1
        return self

    def _release(self) -> None:
        self._running -= 1
        self._line.serve()

    def following(
        self, demand: Callable[[], float], changed: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[None]:
        """`changed` is never called: this machine's budget is fixed."""
        return nullcontext() if self.resources.pool is None else self.resources.pool.following(demand)

    def expecting(self, spec: SandboxSpec, rollouts: int = 1) -> AbstractContextManager[None]:
        return nullcontext() if self.resources.pool is None else self.resources.pool.expecting(spec, rollouts)

    def drain(self) -> None:
        if self.resources.pool is not None:
            self.resources.pool.drain()

    async def describe(self) -> dict[str, Any]:
        return {
            "agent": self.resources.equipment.describe(),
            "sandbox": await self.resources.launcher.describe(self._spec),
        }

    def summary(self) -> str:
        more = {"warm": self._warm, "to grade": self._graders}
        on_top = " and ".join(f"{count} {what}" for what, count in more.items() if count)
        in_all = self.capacity + self._warm + self._graders
        return f"at most {self.capacity} sandboxes" + (f" and {on_top} on top, {in_all} in all" if on_top else "")

    async def replayed(self) -> Replayed | None:
        completer = self.resources.completer
        return completer.replayed if isinstance(completer, ReplayCompleter) else None


def _so_far(lease: Lease) -> Attempt:
    """What is known of a rollout that has not ended."""
    elapsed_s = lease.clock.elapsed_s
    record = Record(
        started_at=time() - elapsed_s,
        turns=tuple(lease.turns),
        tool_calls=tuple(lease.tool_calls),
        crossings=lease.world.crossings(),
        steps=tuple(lease.steps),
        duration_s=elapsed_s,
        waiting_s=lease.clock.waiting_s,
    )
    return Attempt(lease.plan, record, STILL_UNDER_WAY)


class _Slot:
    """The host, with room for one attempt: for grading it gets other room, where there is any."""

    name = ""

    def __init__(self, host: LocalHost, grading: asyncio.Semaphore | None, release: Callable[[], None]) -> None:
        self._host, self._grading = host, grading
        self._release: Callable[[], None] | None = release
        self.works, self.excuses = host.works, host.excuses

    async def carry_out(
        self, plan: RolloutPlan, provision: Provision, needless: SlotNeedless = nullcontext
    ) -> Attempt:
        @asynccontextmanager
        async def graded(goes_on: bool) -> AsyncIterator[None]:
            if self._grading is None:
                yield
                return
            async with self._grading:
                if goes_on:
                    yield
                    return
                self.release()
                with needless():
                    yield

        return await run_rollout(plan, self._host.resources, provision, graded)

    def release(self) -> None:
        """Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()
