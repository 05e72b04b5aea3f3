"""The warm pool on a fake launcher: real sockets and servers, no containers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.errors import DockerError, EnvironmentUnusable, LaunchError, RunUnhealthy, SandboxLostError
from orchestrator.host import sandbox as parked_module
from orchestrator.host.breaker import Breaker
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.channels import Channels
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.launch.pool import WarmPool
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import standstill
from orchestrator.types import SandboxExit, SandboxSpec
from tests.fakes.fake_launcher import CONFINED, FakeLauncher, parked_inhabitant
from tests.fakes.plans import a_sandbox

SPEC = a_sandbox("image")
GUARD_S = 120.0


class Bench:
    """A pool over a fake launcher, and what happened."""

    def __init__(self, launcher: FakeLauncher | None = None, **options: Any) -> None:
        self.launcher = launcher or FakeLauncher(max_sandboxes=100)
        self.handed_out: list[str] = []
        self._directory = TemporaryDirectory(prefix="p")
        self._channels = Channels("pool-test", Path(self._directory.name))
        settings: dict[str, Any] = {"leased": 4, "warm": 2, "backoff": Backoff(0.001, 0.001)}
        self.pool: WarmPool[ParkedSandbox] = WarmPool(self._park, SPEC, **{**settings, **options})

    def _park(self, spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        return parked_sandbox(spec, self.launcher, self._channels.directory)

    async def use(self, spec: SandboxSpec = SPEC, until: asyncio.Event | None = None) -> str:
        """One rollout."""
        async with self.pool.claim(spec) as parked:
            assert parked.connected
            self.handed_out.append(parked.sandbox.sandbox_id)
            if until is not None:
                await until.wait()
            return parked.sandbox.sandbox_id

    async def __aenter__(self) -> Bench:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.pool.aclose()
        assert self.launcher.live == {}
        assert list(self._channels.root.glob("*/")) == []
        self._directory.cleanup()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_claim_gets_a_parked_one_and_another_takes_its_place() -> None:
    async with Bench() as bench:
        await eventually(lambda: bench.pool.parked == 2)
        warm = set(bench.launcher.live)
        async with bench.pool.claim(SPEC) as parked:
            assert parked.sandbox.sandbox_id in warm
            await eventually(lambda: bench.pool.parked == 2)
            assert len(bench.launcher.live) == 3
        await eventually(lambda: len(bench.launcher.live) == 2)


async def test_a_claim_gets_the_one_parked_last_so_that_one_too_many_stays_unclaimed() -> None:
    async with Bench(warm=3) as bench:
        await eventually(lambda: bench.pool.parked == 3)
        with bench.pool.following(lambda: 0):  # nothing takes the place of what is claimed
            oldest, middle, newest = bench.launcher.live
            async with bench.pool.claim(SPEC) as first, bench.pool.claim(SPEC) as second:
                assert [first.sandbox.sandbox_id, second.sandbox.sandbox_id] == [newest, middle]
                assert oldest in bench.launcher.live


async def test_each_is_used_for_one_rollout_and_the_sum_is_never_exceeded() -> None:
    async with Bench(FakeLauncher(max_sandboxes=100, create_s=0.002)) as bench:
        slots = asyncio.Semaphore(4)

        async def rollout(number: int) -> None:
            async with slots:
                await bench.use(SPEC if number % 3 else a_sandbox("another image"))

        async with asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(rollout(number))
        assert len(set(bench.handed_out)) == 60
        assert bench.launcher.most_at_once <= 6


async def test_head_start_is_for_the_first_rollouts_and_gives_way() -> None:
    async with Bench(head_start=100) as bench:
        await eventually(lambda: bench.pool.parked == 6)  # leased + warm
        done = asyncio.Event()
        own_image = [asyncio.create_task(bench.use(a_sandbox("another image"), done)) for _ in range(4)]
        await eventually(lambda: len(bench.handed_out) == 4)
        await eventually(lambda: bench.pool.parked == 2)
        done.set()
        await asyncio.gather(*own_image)
        assert bench.launcher.most_at_once == 6


async def test_without_warm_ones_every_sandbox_is_made_for_its_rollout() -> None:
    async with Bench(warm=0, head_start=8) as bench:
        await asyncio.sleep(0)
        assert bench.launcher.launched == 0
        await asyncio.gather(*(bench.use() for _ in range(4)))
        assert bench.launcher.launched == 4
        assert bench.pool.parked == 0


async def test_a_claim_takes_over_one_in_the_making() -> None:
    async with Bench(FakeLauncher(max_sandboxes=100, create_s=0.05), warm=1) as bench:
        await bench.use()
        assert bench.handed_out == ["fake-1"]


class HangingUp:
    """Sandboxes that park; the first one closes its connection when told to, and does not end."""

    def __init__(self) -> None:
        self.now = asyncio.Event()
        self._count = 0

    async def __call__(self, channel: Path) -> SandboxExit:
        self._count += 1
        first = self._count == 1
        async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
            stub: Any = pb_grpc.SandboxServiceStub(connection)
            call = stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED))
            await (self.now if first else asyncio.Event()).wait()
            call.cancel()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@pytest.mark.parametrize("how", ["ends", "is removed", "hangs up"])
async def test_one_that_died_parked_is_never_handed_out(how: str) -> None:
    hanging_up = HangingUp()
    launcher = FakeLauncher(hanging_up if how == "hangs up" else parked_inhabitant, max_sandboxes=100)
    async with Bench(launcher, warm=1) as bench:
        await eventually(lambda: bench.pool.parked == 1)
        ((first, sandbox),) = bench.launcher.live.items()
        match how:
            case "ends":
                sandbox.end(SandboxExit(137, oom_killed=True))
            case "is removed":
                sandbox.lose()
            case _:
                hanging_up.now.set()
        await eventually(lambda: first not in bench.launcher.live)
        assert await bench.use() != first
        await eventually(lambda: bench.pool.parked == 1)


async def test_one_whose_connection_is_cut_is_passed_over_before_anybody_cleans_up() -> None:
    hanging_up = HangingUp()
    async with Bench(
        FakeLauncher(hanging_up, max_sandboxes=100), backoff=Backoff(10 * GUARD_S, 10 * GUARD_S)
    ) as bench:
        await eventually(lambda: bench.pool.parked == 2)
        first = next(iter(bench.launcher.live))
        hanging_up.now.set()
        await eventually(lambda: bench.pool.parked == 1)
        assert await bench.use() != first


async def weakly_confined(channel: Path) -> SandboxExit:
    """Parks without a seccomp filter."""
    async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
        confinement = pb.Confinement()
        confinement.CopyFrom(CONFINED)
        confinement.seccomp_mode = 0
        stub: Any = pb_grpc.SandboxServiceStub(connection)
        try:
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=confinement)):
                pass
        except grpc.aio.AioRpcError:
            pass
    return SandboxExit(0, oom_killed=False)


async def test_a_weakly_confined_one_is_never_parked_and_stops_the_run() -> None:
    async with Bench(FakeLauncher(weakly_confined)) as bench:
        for _ in range(2):
            with pytest.raises(EnvironmentUnusable, match="seccomp"):
                await bench.use()
        await eventually(lambda: bench.launcher.live == {})
        assert bench.handed_out == []
        assert bench.pool.parked == 0
        assert bench.launcher.launched <= 3  # nothing is tried again


async def test_failures_are_named_paused_after_and_got_over() -> None:
    async with Bench(FakeLauncher(max_sandboxes=100, failures=5)) as bench:
        await eventually(lambda: bench.pool.parked == 2)
    async with Bench(FakeLauncher(max_sandboxes=100, failures=1), warm=0) as bench:
        with pytest.raises(LaunchError, match="told to fail"):
            await bench.use()
        await bench.use()


async def test_one_begun_ahead_that_does_not_come_up_costs_no_claim_anything() -> None:
    """As after a pause of this process: the sandboxes that started meanwhile have given up."""
    launcher = FakeLauncher(max_sandboxes=100, failures=2, create_s=0.05)
    async with Bench(launcher, warm=2, backoff=Backoff(60.0, 60.0)) as bench:
        await asyncio.gather(bench.use(), bench.use())
        assert bench.pool.claims == {"ready": 0, "made": 2, "none": 0}
        assert len(set(bench.handed_out)) == 2


async def test_starts_in_which_this_process_stood_still_are_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandboxes wait for longer than the process stands still, but not for ever: their end is not awaited."""
    monkeypatch.setattr(parked_module, "standstill", partial(standstill, 1.5))
    monkeypatch.setattr(parked_module, "PARK_TIMEOUT_S", 3.0)
    stood, started = False, 0

    async def starting(channel: Path) -> SandboxExit:
        nonlocal started
        if not stood:
            started += 1
            await asyncio.Event().wait()
        return await parked_inhabitant(channel)

    async with Bench(FakeLauncher(starting), warm=1) as bench:
        ahead, own = asyncio.create_task(bench.use()), asyncio.create_task(bench.use(a_sandbox("own")))
        await eventually(lambda: started == 3)  # both, and one more ahead
        await asyncio.sleep(0.2)  # by now all three are waited for
        stood = True
        time.sleep(4.0)
        assert await ahead
        with pytest.raises(SandboxLostError, match="the orchestrator itself stood still for"):
            await own


async def test_one_begun_ahead_that_fails_like_the_claim_s_own_ends_the_claim() -> None:
    launcher = FakeLauncher(max_sandboxes=100, failures=3, create_s=0.05)
    async with Bench(launcher, warm=1, backoff=Backoff(60.0, 60.0)) as bench:
        with pytest.raises(LaunchError, match="told to fail"):
            await bench.use()


async def test_a_claim_that_waits_when_the_pool_closes_begins_no_sandbox_any_more() -> None:
    launcher = FakeLauncher(max_sandboxes=100, create_s=60.0)
    async with Bench(launcher, warm=1) as bench:
        claim = asyncio.create_task(bench.use())
        await asyncio.sleep(0)
        await bench.pool.aclose()
        with pytest.raises(LaunchError, match="closed"):
            await claim
        assert bench.pool.states() == {"starting": 0, "ready": 0, "leased": 0, "ending": 0}


async def test_it_pauses_while_docker_is_away_and_goes_on_by_itself() -> None:
    away, asked, said = True, 0, list[str]()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if away:
            raise DockerError("nobody there")

    docker = Breaker("Docker", ask, said.append, backoff=Backoff(0.001, 0.001))

    async def recovered() -> None:
        await docker.away()
        await docker.passed()

    async with Bench(FakeLauncher(max_sandboxes=100, failures=1), warm=1, recovered=recovered) as bench:
        await eventually(lambda: asked > 5)
        assert bench.launcher.launched == 0
        away = False
        await eventually(lambda: bench.pool.parked == 1)
    assert len(said) == 2


async def test_what_stays_away_for_good_is_told_to_the_next_claim() -> None:
    async def recovered() -> None:
        raise RunUnhealthy("Docker has been away for 900 s")

    async with Bench(FakeLauncher(failures=1), warm=1, recovered=recovered) as bench:
        await eventually(lambda: bench.pool.spare == 0)

        async def use_again_and_again() -> None:
            async with asyncio.timeout(GUARD_S):
                while True:
                    await bench.use()

        with pytest.raises(RunUnhealthy):
            await use_again_and_again()


async def test_drained_it_keeps_what_runs_and_removes_what_waits() -> None:
    async with Bench() as bench:
        await eventually(lambda: bench.pool.parked == 2)
        async with bench.pool.claim(SPEC) as parked:
            bench.pool.drain()
            await eventually(lambda: list(bench.launcher.live) == [parked.sandbox.sandbox_id])
            assert parked.connected
        await eventually(lambda: bench.launcher.live == {})


async def test_the_number_follows_the_demand() -> None:
    async with Bench(warm=3, idle_s=0.02) as bench:
        await eventually(lambda: len(bench.launcher.live) == 1)  # nobody wants any: one is kept
        bench.pool.idle_s = 10 * GUARD_S
        done = asyncio.Event()
        rollouts = [asyncio.create_task(bench.use(SPEC, done)) for _ in range(4)]
        await eventually(lambda: bench.launcher.most_at_once >= 6)  # in demand: more than one again
        done.set()
        await asyncio.gather(*rollouts)


async def test_no_more_are_made_than_will_be_wanted() -> None:
    async with Bench() as bench:
        await eventually(lambda: bench.pool.parked == 2)
        with bench.pool.following(lambda: 0):
            for _ in range(3):
                await bench.use()
            await eventually(lambda: bench.pool.spare == 0)
            assert bench.launcher.launched == 3
        await bench.use()
        await eventually(lambda: bench.pool.parked == 2)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.03])
async def test_cancelled_claims_and_closing_leave_nothing(after_s: float) -> None:
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(
            Bench(FakeLauncher(max_sandboxes=100, create_s=0.01), head_start=4)
        )
        tasks = [asyncio.create_task(bench.use(SPEC, asyncio.Event())) for _ in range(4)]
        await asyncio.sleep(after_s)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.wait(tasks[:3])
        tasks[3].cancel()
        await asyncio.wait(tasks)
    assert bench.launcher.most_at_once <= 6


# ---------------------------------------------------------------- tasks with images of their own

OWN, OTHER = a_sandbox("own"), a_sandbox("other")


def parked_as(bench: Bench, *specs: SandboxSpec) -> Callable[[], bool]:
    """Whether these and no others are parked."""
    return lambda: sorted(spec.image for spec in bench.pool.ready) == sorted(spec.image for spec in specs)


async def test_sandboxes_are_parked_for_the_rollouts_that_come_next() -> None:
    async with Bench() as bench:
        await eventually(parked_as(bench, SPEC, SPEC))
        with bench.pool.expecting(OWN), bench.pool.expecting(OTHER, 8):
            await eventually(parked_as(bench, OWN, OTHER))
        warm = set(bench.launcher.live)
        assert {await bench.use(OWN), await bench.use(OTHER)} == warm
        assert bench.launcher.most_at_once <= 6


async def test_what_is_parked_for_nobody_stays_until_its_place_is_wanted() -> None:
    async with Bench() as bench:
        with bench.pool.expecting(OWN, 2):
            await eventually(parked_as(bench, OWN, OWN))
        launched = bench.launcher.launched
        await asyncio.sleep(0.01)
        assert parked_as(bench, OWN, OWN)()
        with bench.pool.expecting(OWN), bench.pool.expecting(SPEC):
            await eventually(parked_as(bench, OWN, SPEC))
        assert bench.launcher.launched == launched + 1


async def test_after_a_claim_of_an_own_image_none_is_made_for_tasks_that_are_not_known() -> None:
    async with Bench() as bench:
        with bench.pool.expecting(OWN, 2):
            await eventually(parked_as(bench, OWN, OWN))
        await bench.use(OWN)
        await bench.use(OWN)
        await eventually(lambda: bench.launcher.live == {})
        await bench.use(SPEC)
        await eventually(parked_as(bench, SPEC, SPEC))


async def test_with_many_images_the_sum_holds_and_most_claims_find_theirs() -> None:
    """As in a run: the next rollouts are known while they wait for a slot."""
    async with Bench(FakeLauncher(max_sandboxes=100, create_s=0.01), head_start=4) as bench:
        slots, found = asyncio.Semaphore(4), 0

        async def rollout(spec: SandboxSpec) -> None:
            nonlocal found
            with ExitStack() as waiting:
                waiting.enter_context(bench.pool.expecting(spec))
                async with slots:
                    waiting.close()
                    found += spec in bench.pool.ready
                    async with bench.pool.claim(spec):
                        await asyncio.sleep(0.25)  # long beside what a busy machine takes from a process

        async with asyncio.TaskGroup() as tasks:
            for number in range(48):
                tasks.create_task(rollout((SPEC, OWN, OTHER)[number // 8 % 3]))
        assert bench.launcher.most_at_once <= 6
        assert found >= 12, found
        assert bench.launcher.launched <= 48 + 8
