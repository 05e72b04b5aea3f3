"""Runs many plans under one sandbox budget, retries failures, turns errors of rollouts into outcomes."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from time import time
from typing import Any

from orchestrator.engine.health import HealthGate
from orchestrator.errors import AuthenticationError, OrchestratorError, RolloutError
from orchestrator.host.base import Host, Hosts, Provision
from orchestrator.rules.outcome import failed
from orchestrator.rules.plan import next_attempt
from orchestrator.rules.retries import BEFORE_RETRIES, MAX_AGENT_ERRORS, MAX_EXCUSED, RETRIED
from orchestrator.rules.waits import first_of, uninterrupted
from orchestrator.types import (
    Attempt,
    Ended,
    Failed,
    FailedName,
    Member,
    Record,
    RolloutPlan,
    SandboxSpec,
)

log = logging.getLogger(__name__)

Result = Member | Attempt


@dataclass(slots=True)
class _Begun:
    """A group that was begun. `coming`: how many of its first rollouts were not yet given to `execute`."""

    turn: int
    coming: int


@dataclass(eq=False, slots=True)
class Executor:
    """Runs attempts on `hosts`, as many at once as these have room for; other executors may share them.

    `stopping`: once it is set, nothing is begun any more. `graded` turns an attempt that can be scored into a
    member of a group. A result counts once `recorded` has returned: then it is on disk. `earlier` gives the
    result of an attempt that an earlier process of the run has recorded: that attempt is not made again.
    """

    hosts: Hosts
    _: KW_ONLY
    max_retries: int
    provision: Provision = Provision()  # noqa: RUF009 - immutable
    graded: Callable[[Attempt], Awaitable[Result]]
    recorded: Callable[[Result], Coroutine[Any, Any, None]]
    started: Callable[[RolloutPlan, str], None] = lambda plan, node: None
    earlier: Callable[[RolloutPlan], Result | None] = lambda plan: None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    health: HealthGate = field(default_factory=HealthGate)
    waiting: int = 0  # rollouts that need a sandbox and wait for a slot
    settled: Callable[[], None] = lambda: None  # called when there may be more room than before
    _wanted: int = 0  # rollouts that have or need a slot, those of `coming` included
    _groups: dict[int, _Begun] = field(default_factory=dict)

    # ------------------------------------------------------------ groups

    def has_room(self, share: float = 1.0) -> bool:
        """Whether no rollout would wait if only this share of the slots existed: then another group may begin."""
        return self._wanted <= share * self.hosts.capacity

    def begin(self, group: int, rollouts: int) -> None:
        """Gives the group its place in the order; `rollouts` of it will be given to `execute`. Optional: without
        this call rollouts are served first come, first served."""
        self._groups[group] = _Begun(self.hosts.turn(), rollouts)
        self._wanted += rollouts

    def end(self, group: int) -> None:
        """A group that was begun is over: no more rollouts of it will be given to `execute`."""
        self._want(-self._groups.pop(group).coming)

    def _want(self, rollouts: int) -> None:
        self._wanted += rollouts
        if rollouts < 0:
            self.settled()

    def _take_turn(self, group: int) -> int:
        begun = self._groups.get(group)
        if begun is not None and begun.coming:
            begun.coming -= 1
        else:
            self._want(1)
        return self.hosts.turn() if begun is None else begun.turn

    @contextmanager
    def _without_slot(self) -> Iterator[None]:
        """Within this block the rollout counts as one that needs no slot."""
        self._want(-1)
        try:
            yield
        finally:
            self._want(1)

    # ------------------------------------------------------------ one rollout

    async def execute(self, plan: RolloutPlan) -> tuple[Result, ...] | None:
        """All attempts of one rollout; the last is its result. None: the run is being stopped.

        An attempt of an earlier process that only lacks its score is graded as the next attempt. The attempt
        without a score is not returned."""
        turn = self._take_turn(plan.group)
        try:
            return await self._execute(plan, turn)
        finally:
            self._want(-1)

    async def _execute(self, plan: RolloutPlan, turn: int) -> tuple[Result, ...] | None:
        results: list[Result] = []
        failures = excuses = agent_errors = 0
        sampled: Attempt | None = None  # by an earlier process, not graded yet
        earlier = await asyncio.to_thread(self.earlier, plan)
        while True:
            made_now, host = earlier is None, None
            if earlier is not None:
                result = earlier
            else:
                attempt, host = await self._attempt(plan, turn, sampled)
                if attempt is None:
                    return None
                result = await self._grade(attempt)
            failure = failure_of(result)
            if failure is not None and not made_now:
                self.health.broke_before(plan.group, failure)
            sampled = _ungraded(result)
            if sampled is None:
                results.append(result)
            if failure is None or failure.name not in RETRIED:
                break
            with self._without_slot():
                excused = host is not None and excuses < MAX_EXCUSED and await host.excuses(failure)
            # An attempt that failed in an earlier process uses up its number but no retry: whoever resumes a run
            # has removed the cause.
            excuses += excused
            failures += made_now and not excused
            agent_errors += made_now and failure.name is FailedName.AGENT_ERROR
            following = next_attempt(plan)
            # If an earlier process made the next attempt, that one counts, whatever the retries left here.
            earlier = await asyncio.to_thread(self.earlier, following)
            if earlier is None and (failures > self.max_retries or agent_errors >= MAX_AGENT_ERRORS):
                break
            plan = following
            if made_now:
                with self._without_slot():
                    await self._pause(BEFORE_RETRIES.pause_s(failures, random.random()))  # noqa: S311
        if made_now:
            self.health.count(plan.group, failure)
        return tuple(results)

    async def _attempt(
        self, plan: RolloutPlan, turn: int, sampled: Attempt | None
    ) -> tuple[Attempt | None, Host | None]:
        """One attempt, not graded yet, and the host that made it. `sampled`: an attempt of an earlier process that
        is only to be graded. No attempt: nothing was begun, as the run is being stopped."""
        if sampled is None:
            return await self._make(plan, turn)
        note = f"graded from the record of {sampled.plan.rollout_id}, where its output files are"
        return Attempt(plan, replace(sampled.record, notes=(*sampled.record.notes, note)), sampled.outcome), None

    async def _make(self, plan: RolloutPlan, turn: int) -> tuple[Attempt | None, Host | None]:
        """If this raises after the rollout was begun, the attempt is on record."""
        begun: Record | None = None
        try:
            async with self._slot(turn, plan.sandbox) as host:
                if host is None:
                    return None, None
                begun = Record(started_at=time(), node=host.name)
                self.started(plan, host.name)
                return await self._carry_out(plan, host, begun), host
        except BaseException as error:
            if begun is not None:
                cancelled = Failed(FailedName.CANCELLED, _why_cancelled(error))
                await uninterrupted(self.recorded(Attempt(plan, begun, cancelled)))
            raise

    async def _carry_out(self, plan: RolloutPlan, host: Host, begun: Record) -> Attempt:
        """Any exception but a RolloutError is a bug or stops the run, and is raised."""
        try:
            attempt = await host.carry_out(plan, self.provision, self._without_slot)
        except AuthenticationError:
            raise
        except RolloutError as error:
            attempt = Attempt(plan, begun, failed(error))
        if isinstance(attempt.outcome, Failed):
            log.warning("rollout %s: %s: %s", plan.rollout_id, attempt.outcome.name, attempt.outcome.headline)
        return attempt

    async def _grade(self, attempt: Attempt) -> Result:
        """If the run is stopped meanwhile, the attempt is recorded without a score, and graded on resume."""
        try:
            with self._without_slot():
                result = await self.graded(attempt)
        except BaseException as error:
            if isinstance(attempt.outcome, Ended):
                cancelled = Failed(FailedName.CANCELLED, f"before it was graded: {_why_cancelled(error)}")
                attempt = replace(attempt, outcome=cancelled, ungraded=attempt.outcome)
            await uninterrupted(self.recorded(attempt))
            raise
        await uninterrupted(self.recorded(result))  # recorded once, also if cancelled here
        return result

    @asynccontextmanager
    async def _slot(self, turn: int, spec: SandboxSpec) -> AsyncIterator[Host | None]:
        """A host that works. None: the run is being stopped. Raises RunUnhealthy."""
        with ExitStack() as waiting:
            waiting.enter_context(self._waits(spec))
            async with self.hosts.slot(turn, spec) as host:
                welcome = host is not None and await self._welcome(host)
                waiting.close()
                yield host if welcome else None

    @contextmanager
    def _waits(self, spec: SandboxSpec) -> Iterator[None]:
        self.waiting += 1
        try:
            with self.hosts.expecting(spec):
                yield
        finally:
            self.waiting -= 1

    async def _welcome(self, host: Host) -> bool:
        """Waits until the host works. False: the run is being stopped. Raises RunUnhealthy."""
        await first_of(host.works(), self.stopping.wait())
        return not self.stopping.is_set()

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but not once the run is being stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


def failure_of(result: Result) -> Failed | None:
    """Why the rollout is no member of its group; None: it is one."""
    if isinstance(result, Attempt) and isinstance(result.outcome, Failed):
        return result.outcome
    return None


def _ungraded(result: Result) -> Attempt | None:
    """The attempt with the outcome it ended with, if the run was stopped before it was scored."""
    if isinstance(result, Member) or result.ungraded is None:
        return None
    return Attempt(result.plan, result.record, result.ungraded)


def _why_cancelled(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the run was stopped, or nobody waits for the group"
    return f"the run ends: {error if isinstance(error, OrchestratorError) else type(error).__name__}"
