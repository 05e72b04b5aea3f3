"""This machine as the host that carries out plans: under a budget of sandboxes, with pauses for what is away."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from orchestrator.completion.replay import ReplayCompleter, Replayed
from orchestrator.errors import EnvironmentUnusable, ImageUnusable, RolloutError
from orchestrator.host.base import HostNow, Provision
from orchestrator.host.breaker import Breaker
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.host.slots import Line
from orchestrator.types import Attempt, Failed, FailedName, RolloutPlan, SandboxSpec

log = logging.getLogger(__name__)


class LocalHost:
    """One host and all hosts of a run in one. `spec`: of the run's sandboxes, of which `warm` are kept ready.
    `breakers`: the service behind failures of that name."""

    name = ""

    def __init__(
        self,
        resources: Resources,
        spec: SandboxSpec,
        *,
        max_sandboxes: int,
        warm: int = 0,
        breakers: Mapping[FailedName, Breaker] | None = None,
    ) -> None:
        self.resources = resources
        self.tokenizer, self.tools = resources.tokenizer, resources.tools
        self.takes_ids, self.why_text = resources.completer.takes_ids, resources.why_text
        self.capacity = max_sandboxes
        self._warm = warm
        self._spec = spec
        self._breakers = breakers or {}
        self._running = 0
        self._line: Line[SandboxSpec, LocalHost] = Line(self._take, LocalHost._release)

    # ------------------------------------------------------------ one attempt

    async def works(self) -> None:
        for breaker in set(self._breakers.values()):
            await breaker.passed()

    async def carry_out(self, plan: RolloutPlan, provision: Provision) -> Attempt:
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
    async def slot(self, turn: int, spec: SandboxSpec) -> AsyncIterator[LocalHost]:
        await self._line.wait(turn, spec)
        try:
            yield self
        finally:
            self._release()

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
        on_top = f" and {self._warm} warm on top, {self.capacity + self._warm} in all" if self._warm else ""
        return f"at most {self.capacity} sandboxes{on_top}"

    async def replayed(self) -> Replayed | None:
        completer = self.resources.completer
        return completer.replayed if isinstance(completer, ReplayCompleter) else None
