"""Attempts under one budget: bounded, retried for infrastructure only, each on record exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.engine import executor as executor_module
from orchestrator.engine.executor import Executor, Result, failure_of
from orchestrator.engine.health import HealthGate
from orchestrator.errors import AuthenticationError, DockerError, OutputError, RunUnhealthy
from orchestrator.host import endings
from orchestrator.host.breaker import Breaker
from orchestrator.host.local import LocalHost
from orchestrator.host.resources import Resources
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import standstill
from orchestrator.types import (
    Attempt,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Limits,
    Member,
    RolloutPlan,
    SandboxExit,
    Score,
)
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.fake_launcher import CONFINED, FakeLauncher
from tests.fakes.plans import a_member, a_plan, an_attempt, some_limits


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "BEFORE_RETRIES", Backoff(0.001, 0.01))


async def answering(channel: Path) -> SandboxExit:
    """Asks for one completion and submits it."""
    async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
        stub = pb_grpc.SandboxServiceStub(connection)
        async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
            pass
        message = pb.Message(role=pb.ROLE_USER, content="What is 6 times 7?")
        request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message])
        response = await stub.Complete(request)
        if response.WhichOneof("result") == "completion":
            answer = response.completion.text.encode()
            reason = pb.STOP_REASON_FINAL_ANSWER
            await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=reason, answer=answer))
    return SandboxExit(0, oom_killed=False)


async def parking_and_staying(channel: Path) -> SandboxExit:
    """Takes its assignment, and does nothing."""
    async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
        stub = pb_grpc.SandboxServiceStub(connection)
        async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
            pass
        await asyncio.Event().wait()
    return SandboxExit(0, oom_killed=False)


class Bench:
    """An executor on a fake launcher, and what it recorded."""

    def __init__(
        self,
        script: list[str | Exception] | None = None,
        launcher: FakeLauncher | None = None,
        gate: asyncio.Event | None = None,
        *,
        max_sandboxes: int = 2,
        breakers: Mapping[FailedName, Breaker] | None = None,
        **more: Any,
    ) -> None:
        self.recorded: list[Result] = []
        self.started: list[RolloutPlan] = []
        self.launcher = launcher or FakeLauncher(answering)
        self.completer = ScriptedCompleter(script or ["42"], gate)
        self._directory = TemporaryDirectory(prefix="x")
        settings: dict[str, Any] = {"max_retries": 2, "recorded": self._record}
        around = Resources(self.launcher, self.completer, None, self._channel)
        self.executor = Executor(
            LocalHost(around, a_plan().sandbox, max_sandboxes=max_sandboxes, breakers=breakers),
            graded=graded,
            started=lambda plan, node: self.started.append(plan),
            **{**settings, **more},
        )

    async def _record(self, result: Result) -> None:
        self.recorded.append(result)

    @contextmanager
    def _channel(self) -> Any:
        with TemporaryDirectory(dir=self._directory.name) as path:
            yield Path(path)

    @property
    def names(self) -> list[str]:
        return [name(result) for result in self.recorded]


async def graded(attempt: Attempt) -> Result:
    if isinstance(attempt.outcome, Failed):
        return attempt
    return Member(attempt, a_member().trajectory, Score(1.0))


def name(result: Result) -> str:
    attempt = result.attempt if isinstance(result, Member) else result
    return str(attempt.outcome.name)


async def test_rollout_that_works_is_one_attempt() -> None:
    bench = Bench()
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == bench.names == ["finished"]
    assert bench.launcher.live == {}


async def test_budget_is_never_exceeded_and_every_attempt_is_recorded_once() -> None:
    bench = Bench(launcher=FakeLauncher(answering, failures=3))
    await asyncio.gather(*(bench.executor.execute(a_plan(index)) for index in range(9)))
    assert bench.launcher.most_at_once <= 2
    assert bench.names.count("finished") == 9
    assert bench.names.count("launch_error") == 3
    assert len(bench.recorded) == len(bench.started)
    assert len({plan.rollout_id for plan in bench.started}) == len(bench.started)


async def test_retries_keep_the_seed_count_up_and_have_an_end() -> None:
    bench = Bench(launcher=FakeLauncher(answering, failures=99))
    results = await bench.executor.execute(a_plan(3))
    assert results is not None
    assert [name(r) for r in results] == ["launch_error"] * 3
    assert [plan.attempt for plan in bench.started] == [0, 1, 2]
    assert {plan.sampling.seed for plan in bench.started} == {a_plan(3).sampling.seed}


@pytest.mark.parametrize("failure", [FailedName.SCORER_ERROR, FailedName.RECORD_ERROR, FailedName.BAD_TASK])
async def test_what_no_sandbox_can_help_is_not_retried(failure: FailedName) -> None:
    async def broken(attempt: Attempt) -> Result:
        return Attempt(attempt.plan, attempt.record, Failed(failure, "our fault"))

    bench = Bench()
    bench.executor.graded = broken
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == [failure]


async def test_refused_key_stops_and_the_attempt_is_still_counted() -> None:
    bench = Bench([AuthenticationError("the endpoint refuses the key")])
    with pytest.raises(AuthenticationError):
        await bench.executor.execute(a_plan())
    assert bench.names == ["cancelled"]
    assert bench.launcher.live == {}


async def test_bug_passes_through_and_the_attempt_is_still_counted() -> None:
    async def bug(attempt: Attempt) -> Result:
        raise ZeroDivisionError

    bench = Bench()
    bench.executor.graded = bug
    with pytest.raises(ZeroDivisionError):
        await bench.executor.execute(a_plan())
    assert bench.names == ["cancelled"]


async def test_cancelled_rollouts_are_recorded_those_not_begun_are_not() -> None:
    bench = Bench(gate=asyncio.Event())
    runs = [asyncio.create_task(bench.executor.execute(a_plan(index))) for index in range(5)]
    async with asyncio.timeout(30):
        while len(bench.completer.requests) < 2:
            await asyncio.sleep(0.01)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert bench.names == ["cancelled"] * 2
    assert bench.completer.cancelled == 2
    assert bench.launcher.live == {}


async def test_stopped_while_it_is_graded_an_attempt_is_on_record_whole_and_graded_from_there() -> None:
    async def never(attempt: Attempt) -> Result:
        grading.set()
        await asyncio.Event().wait()
        raise AssertionError

    grading = asyncio.Event()
    bench = Bench()
    bench.executor.graded = never
    run = asyncio.create_task(bench.executor.execute(a_plan()))
    async with asyncio.timeout(30):
        await grading.wait()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    (stopped,) = bench.recorded
    assert isinstance(stopped, Attempt)
    assert name(stopped) == "cancelled"
    assert stopped.record.answer == "42"
    assert len(stopped.record.turns) == 1
    assert stopped.ungraded == Ended(EndedName.FINISHED)

    later = Bench(earlier=lambda plan: stopped if plan.attempt == 0 else None)
    results = await later.executor.execute(a_plan())
    assert later.started == later.completer.requests == []
    assert results is not None
    assert [name(r) for r in results] == later.names == ["finished"]
    (member,) = later.recorded
    assert isinstance(member, Member)
    assert member.attempt.plan.rollout_id == "g000000-r00-a1"
    assert member.attempt.plan.sampling == a_plan().sampling
    assert member.attempt.record.turns == stopped.record.turns
    # Both are on record now: nothing is left to do.
    known = {0: stopped, 1: member}
    last = Bench(earlier=lambda plan: known.get(plan.attempt))
    assert await last.executor.execute(a_plan()) == (member,)
    assert last.recorded == last.started == []


async def test_unwritable_record_stops_the_rollout() -> None:
    async def full(result: Result) -> None:
        raise OutputError("no space left")

    with pytest.raises(OutputError):
        await Bench(recorded=full).executor.execute(a_plan())


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_rollout_cancelled_while_its_result_is_recorded_is_on_record_once(cancels: int) -> None:
    begun, on_disk, recorded = asyncio.Event(), asyncio.Event(), list[Result]()

    async def slow_disk(result: Result) -> None:
        begun.set()
        await on_disk.wait()
        recorded.append(result)

    run = asyncio.create_task(Bench(recorded=slow_disk).executor.execute(a_plan()))
    await begun.wait()
    for _ in range(cancels):
        run.cancel()
        await asyncio.sleep(0)
    on_disk.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [name(result) for result in recorded] == ["finished"]


async def test_stopping_begins_nothing_and_says_so() -> None:
    stopping = asyncio.Event()
    bench = Bench(stopping=stopping)
    stopping.set()
    assert await bench.executor.execute(a_plan()) is None
    assert bench.recorded == bench.started == []


async def test_stopping_does_not_wait_for_something_that_is_away() -> None:
    async def ask() -> None:
        raise DockerError("no answer")

    stopping, breakers = asyncio.Event(), {FailedName.LAUNCH_ERROR: Breaker("it", ask, lambda text: None)}
    bench = Bench(launcher=FakeLauncher(answering, failures=99), breakers=breakers, stopping=stopping)
    run = asyncio.create_task(bench.executor.execute(a_plan()))
    async with asyncio.timeout(30):
        while not bench.recorded:
            await asyncio.sleep(0.01)
        stopping.set()
        assert await run is None


async def test_outage_uses_up_no_retry_and_makes_no_run_unhealthy() -> None:
    launcher = FakeLauncher(answering, failures=1)
    answers = iter([DockerError("no answer"), DockerError("no answer"), None])

    async def ask() -> None:
        if (error := next(answers)) is not None:
            raise error

    quick = Backoff(0.001, 0.001)
    breakers = {FailedName.LAUNCH_ERROR: Breaker("it", ask, lambda text: None, backoff=quick)}
    health = HealthGate(window=1, least=1, groups=1)
    bench = Bench(launcher=launcher, breakers=breakers, health=health, max_retries=0)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["launch_error", "finished"]


async def test_outages_excuse_five_failures_of_one_rollout_and_no_more() -> None:
    """A service that is away whenever it is asked, and back at once: the rollout does not go round for ever."""
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if asked % 2:
            raise DockerError("no answer")

    quick = Backoff(0.001, 0.001)
    breakers = {FailedName.LAUNCH_ERROR: Breaker("it", ask, lambda text: None, backoff=quick)}
    bench = Bench(launcher=FakeLauncher(answering, failures=12), breakers=breakers, max_retries=1)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["launch_error"] * (5 + 1 + 1)


async def test_nearly_all_breaking_ends_the_run() -> None:
    health = HealthGate(window=4, least=4, groups=4)
    bench = Bench(launcher=FakeLauncher(answering, failures=99), health=health, max_retries=0)
    for group in range(3):
        await bench.executor.execute(replace(a_plan(), group=group))
    with pytest.raises(RunUnhealthy, match="launch_error"):
        await bench.executor.execute(replace(a_plan(), group=3))
    assert bench.names == ["launch_error"] * 4


async def test_a_rollout_counts_once_for_health_however_often_it_was_tried() -> None:
    health = HealthGate(window=8, least=4, groups=2)
    bench = Bench(launcher=FakeLauncher(answering, failures=6), health=health, max_retries=2)
    for group in range(4):
        await bench.executor.execute(replace(a_plan(), group=group))
    assert bench.names == ["launch_error"] * 6 + ["finished"] * 2


async def test_a_group_that_broke_in_an_earlier_process_makes_no_run_unhealthy() -> None:
    health = HealthGate(window=4, least=2, groups=1)
    how: dict[str, Any] = {"health": health, "max_retries": 0}
    again = Bench(launcher=FakeLauncher(answering, failures=99), earlier=known((0, LOST)), **how)
    for index in range(8):
        await again.executor.execute(a_plan(index))
    assert again.names == ["launch_error"] * 8
    fresh = Bench(launcher=FakeLauncher(answering, failures=99), **how)
    await fresh.executor.execute(replace(a_plan(), group=1))
    with pytest.raises(RunUnhealthy):
        await fresh.executor.execute(replace(a_plan(1), group=1))


async def test_standstill_of_our_own_is_nobodys_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = [33.0]

    async def once() -> float:
        return stops.pop() if stops else await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(endings, "standstill", once)
    bench = Bench()
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["sandbox_lost", "finished"]
    assert failure_of(results[0]) == Failed(
        FailedName.SANDBOX_LOST, "the orchestrator itself stood still for 33 s"
    )


@pytest.mark.parametrize(
    "limits",
    [some_limits(rollout_timeout_s=3.0), some_limits(deadline_s=3.0)],
    ids=["the own clock", "the deadline"],
)
async def test_what_is_late_after_a_standstill_is_nobody_s_timeout(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """This process really stands still, for longer than the rollout may last."""
    monkeypatch.setattr(endings, "standstill", partial(standstill, 1.5))
    bench = Bench(launcher=FakeLauncher(parking_and_staying), max_retries=0)
    running = asyncio.create_task(bench.executor.execute(a_plan(limits=limits)))
    async with asyncio.timeout(60.0):
        while not bench.launcher.live or bench.executor.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # it has its assignment
    time.sleep(4.0)
    results = await running
    assert results is not None
    failure = failure_of(results[0])
    assert failure is not None
    assert "the orchestrator itself stood still for" in failure.reason, failure


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2), (5, 2)])
async def test_a_program_without_a_completion_is_tried_again_once(retries: int, attempts: int) -> None:
    bench = Bench(max_retries=retries)
    bench.executor.graded = failing(*[FailedName.AGENT_ERROR] * 9)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == bench.names == ["agent_error"] * attempts


async def test_other_failures_between_use_up_their_own_retries() -> None:
    bench = Bench(max_retries=3)
    bench.executor.graded = failing(FailedName.AGENT_ERROR, FailedName.SANDBOX_LOST, FailedName.AGENT_ERROR)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["agent_error", "sandbox_lost", "agent_error"]


def failing(*names: FailedName) -> Callable[[Attempt], Any]:
    """Attempts break so, one after the other."""
    left = list(names)

    async def broken(attempt: Attempt) -> Result:
        return Attempt(attempt.plan, attempt.record, Failed(left.pop(0), "it broke"))

    return broken


# ---------------------------------------------------------------- what an earlier process has done


def known(*results: tuple[int, Failed | None]) -> Callable[[RolloutPlan], Result | None]:
    """Attempt number → failure, or a member."""
    table = dict(results)

    def earlier(plan: RolloutPlan) -> Result | None:
        if plan.attempt not in table:
            return None
        failure = table[plan.attempt]
        if failure is not None:
            return Attempt(plan, an_attempt().record, failure)
        ended = Attempt(plan, an_attempt().record, Ended(EndedName.FINISHED))
        return Member(ended, a_member().trajectory, Score(1.0))

    return earlier


LOST = Failed(FailedName.SANDBOX_LOST, "gone")
CANCELLED = Failed(FailedName.CANCELLED, "stopped")


async def test_attempt_on_record_is_not_made_again() -> None:
    bench = Bench(earlier=known((0, None)))
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["finished"]
    assert bench.recorded == bench.started == []


async def test_earlier_failures_use_up_no_retry_and_the_next_attempt_has_the_next_number() -> None:
    bench = Bench(earlier=known((0, LOST), (1, LOST)), max_retries=0)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["sandbox_lost", "sandbox_lost", "finished"]
    assert [plan.attempt for plan in bench.started] == [2]


async def test_what_an_outage_had_excused_is_followed_to_its_end() -> None:
    bench = Bench(earlier=known((0, LOST), (1, LOST), (2, LOST), (3, LOST), (4, None)), max_retries=1)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [name(r) for r in results] == ["sandbox_lost"] * 4 + ["finished"]
    assert bench.started == []


async def test_earlier_cancelled_attempts_use_up_a_number_and_no_retry() -> None:
    bench = Bench(earlier=known((0, CANCELLED), (1, CANCELLED), (2, CANCELLED)), max_retries=0)
    results = await bench.executor.execute(a_plan())
    assert results is not None
    assert [plan.attempt for plan in bench.started] == [3]
    assert {plan.sampling.seed for plan in bench.started} == {a_plan().sampling.seed}
