"""Runs many plans under one sandbox budget, retries failures, turns errors of rollouts into outcomes."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from time import time
from typing import Any

from orchestrator.engine.health import HealthGate
from orchestrator.errors import AuthenticationError, OrchestratorError, RolloutError
from orchestrator.host.base import Host, Hosts, Provision
from orchestrator.rules.outcome import failed
from orchestrator.rules.plan import next_attempt
from orchestrator.rules.retries import BEFORE_RETRIES, GONE_ON, MAX_AGENT_ERRORS, MAX_EXCUSED, RETRIED
from orchestrator.rules.waits import first_of, uninterrupted
from orchestrator.types import (
    Attempt,
    Ended,
    Entry,
    Failed,
    FailedName,
    Member,
    Prefix,
    Record,
    RolloutPlan,
    SandboxSpec,
    gathered,
    going_on,
)

log = logging.getLogger(__name__)

Result = Member | Attempt
_STOPPED = Failed(FailedName.CANCELLED, "the orchestrator was stopped")


@dataclass(slots=True)
class _Begun:
    """A group that was begun. `coming`: how many of its first rollouts were not yet given to `execute`."""

    turn: int
    coming: int


@dataclass(slots=True)
class _Failures:
    """Of one rollout, continuations included. `last`: the one that was counted last."""

    counted: int = 0
    excused: int = 0
    last: Failed | None = None


async def _nothing(plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
    return None


@dataclass(eq=False, slots=True)
class Executor:
    """Runs attempts on `hosts`, as many at once as these have room for; other executors may share them.

    `stopping`: once it is set, nothing is begun any more. `graded` turns an attempt that can be scored into a
    member of a group. A result counts once `recorded` has returned: then it is on disk. `earlier` gives the
    result of an attempt that an earlier process of the run has recorded: that attempt is not made again.
    `served` is told what attempts are served; `under_way` gives it back, of an attempt that did not end: the plan
    goes on with it. It gets the ids of the plan and of the attempts before it that were cancelled.
    """

    hosts: Hosts
    _: KW_ONLY
    max_retries: int
    provision: Provision = Provision()  # noqa: RUF009 - immutable
    graded: Callable[[Attempt], Awaitable[Result]]
    recorded: Callable[[Result], Coroutine[Any, Any, None]]
    started: Callable[[RolloutPlan, str], None] = lambda plan, node: None
    earlier: Callable[[RolloutPlan], Result | None] = lambda plan: None
    under_way: Callable[[RolloutPlan, Sequence[str]], Awaitable[Record | None]] = _nothing
    served: Callable[[RolloutPlan, float, Entry], None] = lambda plan, started_at, one: None
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
        failures, agent_errors = _Failures(), 0
        sampled: Attempt | None = None  # by an earlier process, not graded yet
        cancelled: list[str] = []  # attempts right before this one, the last first: their turns are in no line
        earlier = await asyncio.to_thread(self.earlier, plan)
        while True:
            made_now, host = earlier is None, None
            if earlier is not None:
                result = earlier
            else:
                attempt, host = await self._attempt(plan, turn, sampled, failures, cancelled)
                if attempt is None:
                    return None
                made_now = host is not None or sampled is not None
                result = await self._grade(attempt)
            failure = failure_of(result)
            if failure is not None and not made_now:
                self.health.broke_before(plan.group, failure)
            sampled = _ungraded(result)
            if sampled is None:
                results.append(result)
            if failure is None or failure.name not in RETRIED:
                break
            # An attempt that failed in an earlier process uses up its number but no retry: whoever resumes a run
            # has removed the cause.
            if made_now:
                await self._count(failures, failure, host)
            agent_errors += made_now and failure.name is FailedName.AGENT_ERROR
            cancelled = [plan.rollout_id, *cancelled] if isinstance(result, Attempt) and result.lacks_turns else []
            following = next_attempt(plan)
            # If an earlier process made the next attempt, that one counts, whatever the retries left here.
            earlier = await asyncio.to_thread(self.earlier, following)
            if earlier is None and (failures.counted > self.max_retries or agent_errors >= MAX_AGENT_ERRORS):
                break
            plan = following
            if made_now:
                with self._without_slot():
                    await self._pause(BEFORE_RETRIES.pause_s(failures.counted, random.random()))  # noqa: S311
        if made_now:
            self.health.count(plan.group, failure)
        return tuple(results)

    async def _count(self, failures: _Failures, failure: Failed, host: Host | None) -> None:
        """Counts a failure once, unless an outage excuses it."""
        if failure is failures.last:
            return
        with self._without_slot():
            excused = host is not None and failures.excused < MAX_EXCUSED and await host.excuses(failure)
        failures.last = failure
        failures.excused += excused
        failures.counted += not excused

    async def _attempt(
        self,
        plan: RolloutPlan,
        turn: int,
        sampled: Attempt | None,
        failures: _Failures,
        cancelled: Sequence[str],
    ) -> tuple[Attempt | None, Host | None]:
        """One attempt, not graded yet, and the host that made it; no host: it was not made now. `sampled`: an
        attempt of an earlier process that is only to be graded. `cancelled`: attempts whose turns it may have. No
        attempt: the run is being stopped."""
        if sampled is not None:
            note = f"graded from the record of {sampled.plan.rollout_id}, where its output files are"
            record = replace(sampled.record, notes=(*sampled.record.notes, note))
            return Attempt(plan, record, sampled.outcome), None
        known = await self.under_way(plan, (plan.rollout_id, *cancelled))
        if known is not None:
            return await self._gone_on(Attempt(plan, known, _STOPPED), None, turn, failures)
        attempt, host = await self._make(plan, turn)
        if attempt is None:
            return None, None
        return await self._gone_on(attempt, host, turn, failures)

    async def _gone_on(
        self, attempt: Attempt, host: Host | None, turn: int, failures: _Failures
    ) -> tuple[Attempt | None, Host | None]:
        """The attempt; where its sandbox was lost behind a completion, with what followed in a fresh one that was
        brought to where it stood. If that cannot be done, the lost attempt. No attempt: the run is being stopped.
        `host` None: an earlier process began it.

        Whatever is sampled then has the seed that it would have had: nobody gains another draw by it."""
        plan, failure = attempt.plan, attempt.outcome
        begun = host is not None
        while (prefix := _rest(attempt)) is not None and isinstance(failure, Failed):
            stopped = Record(started_at=attempt.record.started_at, node=attempt.record.node) if begun else None
            if host is not None:
                try:
                    if not await self._again(failures, failure, host):
                        break
                except BaseException as error:
                    await self._cancelled(plan, stopped, error)
                    raise
            following, host = await self._make(replace(plan, prefix=prefix), turn, stopped)
            if following is None:
                if stopped is not None:  # its turns are beside the record, for the next attempt
                    await uninterrupted(self.recorded(Attempt(plan, stopped, _STOPPED)))
                return None, None
            begun, failure = True, following.outcome
            went_on = len(following.record.turns) > len(prefix.turns)
            parted = any(one.refused for one in following.record.continued[-1:])
            if went_on or parted or isinstance(failure, Ended):
                attempt = replace(following, plan=plan)
            elif failure.name not in RETRIED:
                return _refused(attempt, prefix, failure), host if attempt.outcome is not _STOPPED else None
        if attempt.outcome is _STOPPED and isinstance(failure, Failed):
            attempt = replace(attempt, outcome=failure)
        return attempt, host

    async def _make(
        self, plan: RolloutPlan, turn: int, stopped: Record | None = None
    ) -> tuple[Attempt | None, Host | None]:
        """If this raises after the rollout was begun, the attempt is on record. `stopped`: it was begun before,
        and this is then its record."""
        begun = stopped
        try:
            async with self._slot(turn, plan.sandbox) as host:
                if host is None:
                    return None, None
                begun = Record(started_at=time(), node=host.name)
                if stopped is None:
                    self.started(plan, host.name)
                return await self._carry_out(plan, host, begun), host
        except BaseException as error:
            await self._cancelled(plan, begun, error)
            raise

    async def _cancelled(self, plan: RolloutPlan, begun: Record | None, error: BaseException) -> None:
        """Records an attempt that was begun and will not end."""
        if begun is not None:
            await uninterrupted(
                self.recorded(Attempt(plan, begun, Failed(FailedName.CANCELLED, _why_cancelled(error))))
            )

    async def _again(self, failures: _Failures, failure: Failed, host: Host) -> bool:
        """Counts a failure, and waits. False: that was one too many."""
        await self._count(failures, failure, host)
        if failures.counted > self.max_retries:
            return False
        with self._without_slot():
            await self._pause(BEFORE_RETRIES.pause_s(max(1, failures.counted), random.random()))  # noqa: S311
        return True

    async def _carry_out(self, plan: RolloutPlan, host: Host, begun: Record) -> Attempt:
        """Any exception but a RolloutError is a bug or stops the run, and is raised."""
        served: list[Entry] = []

        def told(started_at: float, one: Entry) -> None:
            nonlocal begun
            begun = replace(begun, started_at=started_at)
            served.append(one)
            self.served(plan, started_at, one)

        try:
            attempt = await host.carry_out(plan, replace(self.provision, served=told), self._without_slot)
        except AuthenticationError:
            raise
        except RolloutError as error:
            attempt = Attempt(plan, _so_far(plan, served, begun), failed(error))
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


def _rest(attempt: Attempt) -> Prefix | None:
    """From where a fresh sandbox goes on with an attempt whose own was lost. None: it ended otherwise, or there is
    nothing to keep."""
    outcome = attempt.outcome
    if not isinstance(outcome, Failed) or outcome.name not in GONE_ON:
        return None
    return going_on(attempt.record, f"{outcome.name}: {outcome.headline}")


def _refused(attempt: Attempt, prefix: Prefix, failure: Failed) -> Attempt:
    """The lost attempt, which could not be gone on with."""
    why = replace(prefix.continued[-1], turn=0, tokens=0, refused=failure.headline)
    return replace(attempt, record=replace(attempt.record, continued=(*attempt.record.continued, why)))


def _so_far(plan: RolloutPlan, served: Sequence[Entry], begun: Record) -> Record:
    """What is known of an attempt whose host gave none back."""
    if not served:
        return begun
    if (prefix := plan.prefix) is not None:
        # What a branch inherits is told as it is served; what the same rollout had before is not.
        names = ("turns", "tool_calls", "crossings", "branch", "continued") if prefix.continued else ("branch",)
        begun = replace(begun, **{name: getattr(prefix, name) for name in names})
    record = gathered(served, begun)
    return replace(record, duration_s=max(turn.ended_s for turn in record.turns) if record.turns else 0.0)


def _ungraded(result: Result) -> Attempt | None:
    """The attempt with the outcome it ended with, if the run was stopped before it was scored."""
    if isinstance(result, Member) or result.ungraded is None:
        return None
    return Attempt(result.plan, result.record, result.ungraded)


def _why_cancelled(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the run was stopped, or nobody waits for the group"
    return f"the run ends: {error if isinstance(error, OrchestratorError) else type(error).__name__}"
