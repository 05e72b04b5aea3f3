"""Containers of the real Engine: what they are, how they end, and what happens when the Engine fails."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import docker
import pytest
from docker.errors import NotFound

from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable, LaunchError, SandboxLostError
from orchestrator.launch.channels import Channels
from orchestrator.launch.contents import ENVIRONMENT
from orchestrator.launch.docker import request as docker_request
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.request import image_volumes
from orchestrator.launch.names import DEFAULT_IMAGE, LABEL_DEADLINE, LABEL_OWNER, LABEL_PROJECT, LABEL_RUN, PROJECT
from orchestrator.launch.owner import this_process
from orchestrator.types import SandboxSpec
from tests.fakes.engine_proxy import Door, EngineProxy
from tests.fakes.plans import a_sandbox
from tests.integration.launch.probes import (
    MIB,
    answer_of,
    containers_of,
    eventually,
    launcher_for,
    output_of,
    probed,
)

pytestmark = pytest.mark.docker

FOREVER = "import signal\nsignal.pause()"
SPEC = a_sandbox(image=DEFAULT_IMAGE)
HANG_S = 120  # whatever takes longer hangs
CALL_S = 3  # the launcher's patience with an Engine that is to hang


# ---------------------------------------------------------------- what they are


async def test_container_tells_nothing_and_carries_what_the_reaper_needs(
    engine: docker.APIClient, probe: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-77c1")
    async with launcher_for(run) as launcher, probed(launcher, probe, FOREVER) as sandbox:
        inspected = engine.inspect_container(sandbox.sandbox_id)
        labels = inspected["Config"]["Labels"]
        assert labels[LABEL_PROJECT] == PROJECT
        assert labels[LABEL_RUN] == run
        assert labels[LABEL_OWNER] == str(this_process())
        assert time.time() < int(labels[LABEL_DEADLINE])
        assert sorted(inspected["Config"]["Env"]) == sorted(f"{name}={text}" for name, text in ENVIRONMENT.items())
        assert "canary-77c1" not in json.dumps(inspected)
        assert inspected["HostConfig"]["NetworkMode"] == "none"
        assert inspected["HostConfig"]["AutoRemove"] is False


async def test_live_sandboxes_have_uids_of_their_own(engine: docker.APIClient, probe: str, run: str) -> None:
    async with (
        launcher_for(run) as launcher,
        probed(launcher, probe, FOREVER) as one,
        probed(launcher, probe, FOREVER) as other,
    ):
        assert len({one.uids.runner, one.uids.worker, other.uids.runner, other.uids.worker}) == 4
        arguments = engine.inspect_container(one.sandbox_id)["Args"]
        assert str(one.uids.worker) in arguments


async def test_launch_refuses_a_container_that_is_not_confined_and_removes_it(
    engine: docker.APIClient, probe: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = io.BytesIO(f"FROM {probe}\nRUN mkdir /data && touch /data/of-the-image\nVOLUME /data\n".encode())
    image = f"{probe}-volume"
    assert all("error" not in line for line in engine.build(fileobj=recipe, tag=image, rm=True, decode=True))
    try:
        async with launcher_for(run) as launcher:
            flags = "os.statvfs('/data').f_flag"
            look = f"import os, json\nprint(json.dumps([os.listdir('/data'), {flags} & os.ST_RDONLY]))"
            assert await answer_of(engine, launcher, image, look) == [["of-the-image"], os.ST_RDONLY]
        # As it would be if the Engine made the volume by itself.
        monkeypatch.setattr(docker_request, "image_volumes", lambda *_: {})
        async with launcher_for(run) as launcher:
            with pytest.raises(EnvironmentUnusable, match=r"mounts is .*volume"):
                async with probed(launcher, image, FOREVER):
                    pytest.fail("it must not be used")
            assert containers_of(run) == []
        waived = frozenset({"mounts"})
        async with launcher_for(run, waived=waived) as launcher, probed(launcher, image, FOREVER) as sandbox:
            assert sandbox.sandbox_id
    finally:
        for name in image_volumes(image, engine.inspect_image(image)["Id"], ["/data"]).values():
            with suppress(docker.errors.NotFound):  # `cleanup` in another test removes what nobody uses
                engine.remove_volume(name)
        engine.remove_image(image, force=True)


# ---------------------------------------------------------------- how they end


async def test_exit_code_and_last_words_are_told(engine: docker.APIClient, probe: str, run: str) -> None:
    async with launcher_for(run) as launcher:
        async with probed(launcher, probe, "import sys; sys.exit('no \\x1b[31mluck')") as sandbox:
            ended = await sandbox.exited()
            assert (ended.exit_code, ended.oom_killed) == (1, False)
            assert ended.reason == "exit code 1: no ?[31mluck"
            assert await sandbox.cpu_s() is None
        async with probed(launcher, probe, "print('done')") as sandbox:
            assert (await output_of(engine, sandbox)).strip() == "done"
            assert (await sandbox.exited()).reason == "exit code 0"


async def test_pid_1_killed_for_memory_is_told(probe: str, run: str) -> None:
    program = "hoard = []\nwhile True: hoard.append(bytes(b'x' * (16 << 20)))"
    async with (
        launcher_for(run) as launcher,
        probed(launcher, probe, program, memory_bytes=256 * MIB) as sandbox,
    ):
        async with asyncio.timeout(HANG_S):
            ended = await sandbox.exited()
        assert (ended.exit_code, ended.oom_killed) == (137, True)


async def test_cpu_time_grows_with_work(probe: str, run: str) -> None:
    program = "import time\nwhile time.process_time() < 0.5: pass\nimport signal\nsignal.pause()"
    async with launcher_for(run) as launcher, probed(launcher, probe, program) as sandbox:
        async with asyncio.timeout(HANG_S):
            while (spent_s := await sandbox.cpu_s()) is not None and spent_s < 0.5:
                await asyncio.sleep(0.05)
        assert spent_s is not None


async def test_cpu_time_is_asked_of_the_engine_where_control_groups_are_out_of_sight(probe: str, run: str) -> None:
    async with launcher_for(run) as launcher, probed(launcher, probe, FOREVER) as sandbox:
        counted_s = await sandbox.cpu_s()
        engine = Engine(threads=1)
        told_ns = await engine.cpu_ns(sandbox.sandbox_id, timeout_s=20)
        await engine.aclose()
        assert counted_s is not None
        assert told_ns / 1e9 >= counted_s > 0


@pytest.mark.parametrize("how", ["kill", "stop", "pause", "remove"])
async def test_container_that_somebody_else_ends_is_lost(
    engine: docker.APIClient, probe: str, run: str, how: str
) -> None:
    async with launcher_for(run) as launcher, probed(launcher, probe, FOREVER) as sandbox:
        if how == "kill":
            engine.kill(sandbox.sandbox_id)
        elif how == "stop":
            engine.stop(sandbox.sandbox_id, timeout=1)
        elif how == "pause":
            engine.pause(sandbox.sandbox_id)
        else:
            engine.remove_container(sandbox.sandbox_id, force=True)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(SandboxLostError, match="somebody else"):
                await sandbox.exited()


# ---------------------------------------------------------------- what is checked first


async def test_good_machine_passes_and_is_described(run: str) -> None:
    async with launcher_for(run) as launcher:
        await launcher.check(SPEC)
        facts = await launcher.describe(SPEC)
    assert facts["image"] == DEFAULT_IMAGE
    assert facts["image_id"].startswith("sha256:")
    assert facts["docker"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (a_sandbox(image="rollout-orchestrator-sandbox:none"), "orchestrator image build"),
        (a_sandbox(image=DEFAULT_IMAGE, runtime="no-such"), "no-such"),
        (a_sandbox(image=DEFAULT_IMAGE, memory_bytes=1 << 50), "sandbox_memory"),
    ],
)
async def test_what_cannot_work_is_said_in_one_line_before_anything_starts(
    run: str, spec: SandboxSpec, said: str
) -> None:
    async with launcher_for(run) as launcher:
        with pytest.raises(EnvironmentUnusable, match=said):
            await launcher.check(spec)


async def test_too_little_memory_is_the_operators_error(run: str) -> None:
    async with launcher_for(run) as launcher:
        with pytest.raises(ConfigError, match="sandbox_memory"):
            await launcher.check(a_sandbox(image=DEFAULT_IMAGE, memory_bytes=64 * MIB))


async def test_no_docker_is_said_in_one_line(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    launcher = DockerLauncher(run, max_sandboxes=1)
    with pytest.raises(EnvironmentUnusable, match="Docker is not running") as caught:
        await launcher.check(SPEC)
    assert "\n" not in str(caught.value)
    await launcher.aclose()


async def test_image_that_vanished_is_a_launch_error(run: str, tmp_path: Path) -> None:
    async with launcher_for(run) as launcher:
        with pytest.raises(LaunchError):
            async with launcher.launch(a_sandbox(image="rollout-orchestrator-sandbox:none"), tmp_path):
                pytest.fail("there is no image")


# ---------------------------------------------------------------- an Engine that fails


async def test_end_is_not_missed_while_the_event_stream_is_cut(
    engine: docker.APIClient, probe: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EngineProxy(tmp_path / "engine") as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        async with launcher_for(run, engine_grace_s=60) as launcher:
            program = (
                "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
                "print('ready')\nwhile True: signal.pause()"
            )
            async with probed(launcher, probe, program) as sandbox, probed(launcher, probe, FOREVER) as gone:
                await eventually(lambda: b"ready" in engine.logs(sandbox.sandbox_id))
                proxy.door = Door.REFUSE
                proxy.drop()
                await asyncio.to_thread(engine.kill, sandbox.sandbox_id, "USR1")
                await asyncio.to_thread(engine.wait, sandbox.sandbox_id, timeout=HANG_S)
                await asyncio.to_thread(engine.remove_container, gone.sandbox_id, force=True)
                proxy.door = Door.OPEN
                async with asyncio.timeout(HANG_S):
                    assert (await sandbox.exited()).exit_code == 7
                    with pytest.raises(SandboxLostError):
                        await gone.exited()


async def test_engine_that_stays_away_ends_its_sandboxes_and_they_are_removed_when_it_is_back(
    probe: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with EngineProxy(tmp_path / "engine") as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        async with launcher_for(run, engine_grace_s=0.3) as launcher:
            async with probed(launcher, probe, FOREVER) as sandbox:
                proxy.door = Door.REFUSE
                proxy.drop()
                async with asyncio.timeout(HANG_S):
                    with pytest.raises(DockerError, match="went away"):
                        await sandbox.exited()
            assert "could not be removed" in caplog.text
            assert sandbox.sandbox_id[:12] in caplog.text
            assert await asyncio.to_thread(still_there, sandbox.sandbox_id)
            proxy.door = Door.OPEN
            await eventually(lambda: not still_there(sandbox.sandbox_id))


CALLS = {
    "create": r"POST \S*/containers/create",
    "start": r"POST \S*/containers/\w+/start",
    "inspect": r"GET \S*/containers/\w+/json",
    "remove": r"DELETE \S*/containers/",
    "events": r"GET \S*/events",
}


LONG = [Door.HANG, Door.MUTE]  # each call waits for its deadline


@pytest.mark.parametrize(
    "door", [Door.REFUSE, Door.FULL, *(pytest.param(door, marks=pytest.mark.long) for door in LONG)]
)
async def test_engine_that_fails_at_any_call_is_an_error_of_its_own_and_nothing_stays(
    probe: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door
) -> None:
    """At each call in turn the Engine goes, and is back when its absence was noticed, or a moment later."""
    for call in ("create",) if door is Door.FULL else CALLS:
        async with EngineProxy(tmp_path / call) as proxy:
            monkeypatch.setenv("DOCKER_HOST", proxy.url)
            async with launcher_for(run, call_timeout_s=CALL_S, engine_grace_s=CALL_S / 2) as launcher:
                if call != "events":
                    await used(launcher, probe)  # connected, events included
                proxy.shut_at(CALLS[call], door)

                async def back(proxy: EngineProxy = proxy) -> None:
                    await asyncio.wait_for(proxy.shut.wait(), HANG_S)
                    await asyncio.sleep(0.5)  # on time: the proxy itself lives in this loop
                    proxy.door = Door.OPEN
                    proxy.drop()

                opening = asyncio.create_task(back())
                with suppress(DockerError, LaunchError, SandboxLostError):
                    async with asyncio.timeout(HANG_S), probed(launcher, probe, FOREVER):
                        assert door is not Door.FULL, "it was made where nothing can be made"
                await opening
                await used(launcher, probe)


async def test_ready_tells_an_engine_without_space_from_one_that_works(
    probe: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_sandbox(image=probe)
    async with EngineProxy(tmp_path / "engine") as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        async with launcher_for(run) as launcher:
            await launcher.ready(spec)
            assert await asyncio.to_thread(containers_of, run) == []
            proxy.door = Door.FULL
            await launcher.describe(spec)
            with pytest.raises(LaunchError, match="no space left where Docker keeps its images"):
                await launcher.ready(spec)
            proxy.door = Door.OPEN
            with pytest.raises(LaunchError):
                await launcher.ready(a_sandbox(image="rollout-orchestrator-sandbox:none"))
            await launcher.ready(spec)


@pytest.mark.long
async def test_hanging_engine_does_not_hold_up_a_cancel(
    probe: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EngineProxy(tmp_path / "engine") as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        async with launcher_for(run, call_timeout_s=CALL_S) as launcher:
            await used(launcher, probe)
            proxy.shut_at(CALLS["create"], Door.HANG)

            async def use() -> None:
                async with probed(launcher, probe, FOREVER):
                    pytest.fail("it hangs")

            task = asyncio.create_task(use())
            async with asyncio.timeout(HANG_S):
                await proxy.shut.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            proxy.door = Door.OPEN


async def used(launcher: DockerLauncher, image: str) -> None:
    """One container comes and goes, at a later try where the machine is slower than the launcher's patience."""
    async with asyncio.timeout(HANG_S):
        while True:
            with suppress(DockerError):
                async with probed(launcher, image, FOREVER):
                    return


async def test_threads_and_connections_are_gone_after_closing(probe: str, run: str) -> None:
    before = open_descriptors()
    async with launcher_for(run) as launcher, probed(launcher, probe, FOREVER):
        assert "engine-events" in thread_names()
    assert not [name for name in thread_names() if name.startswith("engine")]
    await eventually(lambda: open_descriptors() <= before)


def still_there(container: str) -> bool:
    client = docker.APIClient(base_url="unix:///var/run/docker.sock")
    try:
        client.inspect_container(container)
    except NotFound:
        return False
    finally:
        client.close()
    return True


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_launching_many_at_once_keeps_to_the_cap(engine: docker.APIClient, probe: str, run: str) -> None:
    most = 0

    async def use(launcher: DockerLauncher) -> None:
        nonlocal most
        async with probed(launcher, probe, FOREVER):
            most = max(most, len(await asyncio.to_thread(containers_of, run)))

    async with launcher_for(run, max_sandboxes=3) as launcher, asyncio.TaskGroup() as tasks:
        for _ in range(9):
            tasks.create_task(use(launcher))
    assert 1 <= most <= 3


def test_channel_paths_are_short_random_and_closed_to_others(run: str, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with Channels(run) as channels, channels.directory() as one, channels.directory() as other:
        assert len(str(one / "s")) < 100
        assert one.name != other.name
        assert channels.root.stat().st_mode & 0o777 == 0o700
        assert one.stat().st_mode & 0o777 == 0o711
        assert run not in str(one)
    assert not channels.root.exists()
