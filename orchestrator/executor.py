"""Many plans under one sandbox budget: bounded, retried, every failure turned into an outcome."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from time import time

from orchestrator.errors import AuthenticationError, RolloutError
from orchestrator.outcome import failed
from orchestrator.plan import next_attempt
from orchestrator.rollout import Surroundings, run_rollout
from orchestrator.types import RETRIED, Attempt, Failed, FailedName, Member, Record, RolloutPlan

log = logging.getLogger(__name__)

RETRY_BASE_S = 0.5
RETRY_CAP_S = 15.0


class Executor:
    """Runs attempts, at most `max_sandboxes` at once, sandboxes being created included.

    `graded` turns an attempt into a member of a group where it is scored; `recorded` is called with
    the result before it counts, so that it is on disk by then.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        max_sandboxes: int,
        max_retries: int,
        graded: Callable[[Attempt], Member | Attempt],
        recorded: Callable[[Member | Attempt], None],
        started: Callable[[RolloutPlan], None] = lambda plan: None,
    ) -> None:
        self._around = around
        self._slots = asyncio.Semaphore(max_sandboxes)
        self._max_retries = max_retries
        self._graded = graded
        self._recorded = recorded
        self._started = started

    async def execute(self, plan: RolloutPlan) -> tuple[Member | Attempt, ...]:
        """All attempts of one rollout; the last one is what became of it."""
        results: list[Member | Attempt] = []
        for tries in range(self._max_retries + 1):
            result = await asyncio.to_thread(self._graded, await self._attempt(plan))
            self._recorded(result)
            results.append(result)
            if isinstance(result, Member) or not retryable(result):
                break
            if tries == self._max_retries:
                break
            backoff = min(RETRY_CAP_S, RETRY_BASE_S * 2**tries)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))  # noqa: S311
            plan = next_attempt(plan)
        return tuple(results)

    async def _attempt(self, plan: RolloutPlan) -> Attempt:
        """One attempt. Anything but a RolloutError is a bug, or stops the run, and passes through."""
        async with self._slots:
            self._started(plan)
            started_at = time()
            try:
                attempt = await run_rollout(plan, self._around)
            except AuthenticationError:
                raise
            except RolloutError as error:
                attempt = Attempt(plan, Record(started_at=started_at), failed(error))
            except asyncio.CancelledError:
                cancelled = Failed(FailedName.CANCELLED, "the run was stopped, or nobody waits for the group")
                self._recorded(Attempt(plan, Record(started_at=started_at), cancelled))
                raise
        if isinstance(attempt.outcome, Failed):
            log.warning("rollout %s: %s: %s", plan.rollout_id, attempt.outcome.name, attempt.outcome.reason)
        return attempt


def retryable(attempt: Attempt) -> bool:
    """Whether the infrastructure broke, so that a fresh sandbox may do better."""
    return isinstance(attempt.outcome, Failed) and attempt.outcome.name in RETRIED
