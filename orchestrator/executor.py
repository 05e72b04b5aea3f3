"""Many plans under one sandbox budget: bounded, retried, every failure turned into an outcome."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import time
from typing import Any

from orchestrator.breaker import Breaker, HealthGate
from orchestrator.errors import AuthenticationError, OrchestratorError, RolloutError
from orchestrator.launch.uninterrupted import uninterrupted
from orchestrator.outcome import failed
from orchestrator.plan import next_attempt
from orchestrator.rollout import Surroundings, first_of, run_rollout
from orchestrator.types import RETRIED, Attempt, Failed, FailedName, Member, Record, RolloutPlan

log = logging.getLogger(__name__)

RETRY_BASE_S = 0.5
RETRY_CAP_S = 15.0
MAX_EXCUSED = 5  # failures of one rollout that an outage is made answerable for

_AGAIN = RETRIED | {FailedName.CANCELLED}

Result = Member | Attempt


@dataclass(slots=True)
class Launching:
    """What decides whether another sandbox is launched, shared by all rollouts of a run.

    `stopping`: nothing is begun any more. `breakers`: what stands behind a failure of that name.
    """

    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    breakers: Mapping[FailedName, Breaker] = field(default_factory=dict)
    health: HealthGate = field(default_factory=HealthGate)

    async def welcome(self) -> bool:
        """Waits while something is away. False: the run is being stopped. Raises RunUnhealthy."""
        for breaker in set(self.breakers.values()):
            await first_of(breaker.passed(), self.stopping.wait())
        return not self.stopping.is_set()

    async def excuses(self, failure: Failed | None) -> bool:
        """Whether it is the failure of something that is away now."""
        breaker = None if failure is None else self.breakers.get(failure.name)
        return breaker is not None and await breaker.away()

    async def pause(self, seconds: float) -> None:
        """Sleeps, but not while the run is being stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


class Executor:
    """Runs attempts, at most `max_sandboxes` at once, sandboxes being created included; with `slots`, as many as
    those leave, whoever else takes from them.

    `graded` turns an attempt into a member of a group where it is scored; the result counts when `recorded` has
    returned, so that it is on disk by then. `earlier` gives the result of an attempt
    that an earlier process of the same run has recorded: it is not made again.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        max_sandboxes: int,
        max_retries: int,
        graded: Callable[[Attempt], Awaitable[Result]],
        recorded: Callable[[Result], Coroutine[Any, Any, None]],
        started: Callable[[RolloutPlan], None] = lambda plan: None,
        earlier: Callable[[RolloutPlan], Result | None] = lambda plan: None,
        launching: Launching | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self._around = around
        self.waiting = 0  # rollouts that want a sandbox and have no slot yet
        self._slots = slots or asyncio.Semaphore(max_sandboxes)
        self._max_retries = max_retries
        self._graded = graded
        self._recorded = recorded
        self._started = started
        self._earlier = earlier
        self._launching = launching or Launching()

    async def execute(self, plan: RolloutPlan) -> tuple[Result, ...] | None:
        """All attempts of one rollout; the last one is what became of it. None: the run is being stopped."""
        results: list[Result] = []
        failures = excuses = 0
        known = await asyncio.to_thread(self._earlier, plan)
        while True:
            result = known or await self._carry_out(plan)
            if result is None:
                return None
            results.append(result)
            failure = failure_of(result)
            excused = known is None and excuses < MAX_EXCUSED and await self._launching.excuses(failure)
            if known is None and not excused:
                self._launching.health.count(plan.group, failure)
            if failure is None or failure.name not in _AGAIN:
                return tuple(results)
            # What failed in an earlier process used up its number and nothing else: whoever resumes a run
            # has seen to the cause.
            made_now = known is None
            excuses += excused
            failures += made_now and not excused
            plan = next_attempt(plan)
            # What an earlier process went on with, for reasons of its own, is followed to its end.
            known = await asyncio.to_thread(self._earlier, plan)
            if known is None and failures > self._max_retries:
                return tuple(results)
            if made_now:
                backoff_s = min(RETRY_CAP_S, RETRY_BASE_S * 2.0 ** (failures - 1))
                await self._launching.pause(backoff_s * random.uniform(0.5, 1.5))  # noqa: S311

    async def _carry_out(self, plan: RolloutPlan) -> Result | None:
        """One attempt, on record when this returns or raises. None: not begun, the run is being stopped."""
        begun_at: float | None = None
        try:
            async with self._slot():
                if not await self._launching.welcome():
                    return None
                begun_at = time()
                self._started(plan)
                attempt = await self._attempt(plan, begun_at)
            result = await self._graded(attempt)
        except BaseException as error:
            if begun_at is not None:
                cancelled = Failed(FailedName.CANCELLED, _why_cancelled(error))
                await uninterrupted(self._recorded(Attempt(plan, Record(started_at=begun_at), cancelled)))
            raise
        await uninterrupted(self._recorded(result))  # cancelled meanwhile or not, it is recorded once
        return result

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _attempt(self, plan: RolloutPlan, begun_at: float) -> Attempt:
        """Anything but a RolloutError is a bug, or stops the run, and passes through."""
        try:
            attempt = await run_rollout(plan, self._around)
        except AuthenticationError:
            raise
        except RolloutError as error:
            attempt = Attempt(plan, Record(started_at=begun_at), failed(error))
        if isinstance(attempt.outcome, Failed):
            log.warning("rollout %s: %s: %s", plan.rollout_id, attempt.outcome.name, attempt.outcome.reason)
        return attempt


def failure_of(result: Result) -> Failed | None:
    """Why it is no member of a group; None: it is one."""
    if isinstance(result, Attempt) and isinstance(result.outcome, Failed):
        return result.outcome
    return None


def _why_cancelled(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the run was stopped, or nobody waits for the group"
    return f"the run ends: {error if isinstance(error, OrchestratorError) else type(error).__name__}"
