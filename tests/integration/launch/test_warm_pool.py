"""The warm pool with real containers: parked ones are handed out once, dead ones never, weak ones never made."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import docker
import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker import launcher as docker_launcher
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.types import Attempt, EndedName, SandboxSpec
from tests.e2e import leftovers
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.inference import Reply, ScriptedServer, always
from tests.fakes.plans import a_plan, a_sandbox
from tests.fakes.runs import cleaning, flags, place, running, until, write_tasks
from tests.fakes.runs import run as run_command
from tests.integration.launch.probes import containers_of, eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

SPEC = a_sandbox(DEFAULT_IMAGE)
GUARD_S = 300.0
LOOK = """Thought: what is here?
<code>
import os
print("kept:", [name for name in ("x", "y", "result") if name in globals()])
print("files:", os.listdir("."), os.listdir("/tmp"), os.listdir("/attachments"))
mine = [pid for pid in os.listdir("/proc") if pid.isdecimal() and os.stat(f"/proc/{pid}").st_uid == os.getuid()]
print("processes:", len(mine))
</code>"""
ANSWER = "Thought: done.\n<code>\nfinal_answer('seen')\n</code>"


@asynccontextmanager
async def pool_for(run: str, *, leased: int, warm: int) -> AsyncIterator[Resources]:
    """A pool of containers, of which none remains."""
    launcher, ramp = DockerLauncher(run, max_sandboxes=leased + warm), Ramp()

    with Channels(run) as channels:

        def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
            return parked_sandbox(spec, launcher, channels.directory, ramp)

        try:
            async with WarmPool(park, SPEC, leased=leased, warm=warm) as pool:
                yield Resources(launcher, Looking(), None, channels.directory, pool=pool)
        finally:
            await launcher.aclose()
            assert await asyncio.to_thread(containers_of, run) == []


class Looking(ScriptedCompleter):
    """Each rollout looks around and answers."""

    def __init__(self) -> None:
        super().__init__([LOOK])

    async def sample(self, request: Any) -> Any:
        self._script = [LOOK if request.sequence == 1 else ANSWER]
        return await super().sample(request)


async def test_parked_containers_are_used_once_replaced_and_never_too_many(
    run: str, engine: docker.APIClient
) -> None:
    most, over = 0, asyncio.Event()

    async def count() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, len(await asyncio.to_thread(containers_of, run)))
            await asyncio.sleep(0.05)

    async with pool_for(run, leased=2, warm=1) as around, asyncio.TaskGroup() as tasks:
        pool = around.pool
        assert pool is not None
        tasks.create_task(count())
        slots = asyncio.Semaphore(2)

        async def rollout(index: int) -> Attempt:
            async with slots:
                return await run_rollout(replace(a_plan(index), sandbox=SPEC), around)

        async def the_parked_one() -> dict[str, str]:
            await eventually(lambda: pool.parked == pool.spare == 1, within_s=GUARD_S)
            (found,) = await asyncio.to_thread(engine.containers, filters={"label": f"orchestrator.run={run}"})
            return {"id": found["Id"], "name": found["Names"][0]}

        # One that dies while it is parked is noticed, removed and replaced.
        first = await the_parked_one()
        await asyncio.to_thread(engine.kill, first["id"])
        await eventually(lambda: first["name"] not in containers_of(run), within_s=GUARD_S)
        second = await the_parked_one()
        assert second["id"] != first["id"]

        # A rollout gets the parked one; nothing of the rehearsal is there.
        attempt = await rollout(0)
        assert attempt.record.sandbox_id == second["id"]
        assert attempt.outcome.name is EndedName.FINISHED, attempt
        for line in ("kept: []", "files: [] [] []", "processes: 1"):
            assert line in attempt.record.steps[0].observations

        # More rollouts at once than there is room for.
        attempts = await asyncio.gather(*map(rollout, range(1, 6)))
        assert {attempt.outcome.name for attempt in attempts} == {EndedName.FINISHED}
        assert len({attempt.record.sandbox_id for attempt in attempts} | {second["id"]}) == 6

        third = await the_parked_one()
        pool.drain()
        await eventually(lambda: containers_of(run) == [], within_s=GUARD_S)
        assert third["id"] not in {attempt.record.sandbox_id for attempt in attempts}
        over.set()
    assert 2 <= most <= 3


async def test_a_container_weaker_than_it_must_be_is_refused_and_not_tried_again(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def weak(*arguments: Any, **options: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        config = original(*arguments, **options)
        config["HostConfig"]["SecurityOpt"] = ["no-new-privileges", "seccomp=unconfined"]
        return config

    original = docker_launcher.create_body
    monkeypatch.setattr(docker_launcher, "create_body", weak)
    async with pool_for(run, leased=1, warm=1) as around:
        assert around.pool is not None
        for _ in range(2):
            with pytest.raises(EnvironmentUnusable, match="seccomp"):
                async with around.pool.claim(SPEC):
                    pytest.fail("it was handed out")
        assert around.pool.parked == 0
    assert made <= 2


@pytest.mark.long
async def test_killed_with_warm_containers_a_run_leaves_none_after_cleanup() -> None:
    with place() as home:
        write_tasks(home / "tasks.jsonl", 3)
        async with ScriptedServer("vllm", always(Reply("Thought.", delay_s=10_000.0))) as server:
            given = flags(home, server.base_url, launcher="docker", max_concurrent_sandboxes=2, warm_sandboxes=1)
            async with running(*given, directory=home) as started:
                pid = started.process.pid
                await until(
                    lambda: len(server.log.completions) == 2 and len(leftovers.containers_of(pid)) == 3,
                    "two rollouts and a warm one",
                )
                started.signal(signal.SIGKILL)
                await started.ended()
            with cleaning():
                ended = await run_command(directory=home, command="cleanup")
        assert ended.code == 0, ended.stderr
        assert leftovers.containers_of(pid) == []
