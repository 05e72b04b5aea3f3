"""What every launcher must do, the fake included: one suite over all of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import PREFIX, Channels
from orchestrator.launch.confinement import untold_by, verify_confinement
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_no_forks
from orchestrator.launch.process import ProcessLauncher
from orchestrator.proxy.server import SandboxServer
from orchestrator.types import Confinement, SandboxSpec
from tests.fakes import oci_images
from tests.fakes.fake_launcher import FakeLauncher
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_sandbox, a_writable_sandbox
from tests.integration.launch.probes import containers_of, eventually

PLAIN = a_sandbox(image=DEFAULT_IMAGE)
WRITABLE = a_writable_sandbox(DEFAULT_IMAGE)
PARK_S = 120.0


@dataclass(frozen=True)
class Candidate:
    """A launcher under test, and how to see what is left of its sandboxes."""

    launcher: Launcher
    left: Callable[[], list[str]]
    spec: SandboxSpec = PLAIN


@pytest.fixture(
    params=[
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("docker-runsc", marks=[pytest.mark.docker, pytest.mark.full]),
        pytest.param("oci", marks=pytest.mark.docker),
        pytest.param("oci-fork", marks=pytest.mark.docker),
        pytest.param("oci-writable", marks=pytest.mark.docker),
        pytest.param("oci-writable-fork", marks=pytest.mark.docker),
        pytest.param("oci-crun", marks=pytest.mark.docker),
        pytest.param("oci-runsc", marks=[pytest.mark.docker, pytest.mark.full]),
        "process",
        "fake",
    ]
)
async def candidate(
    request: pytest.FixtureRequest, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Candidate]:
    made: Candidate
    if request.param.startswith("docker"):
        spec = PLAIN
        if request.param == "docker-runsc":
            # Its own threads count as well.
            spec = a_sandbox(image=DEFAULT_IMAGE, runtime=request.getfixturevalue("runsc"), pids=512)
        made = Candidate(DockerLauncher(run, max_sandboxes=2), lambda: containers_of(run), spec)
    elif request.param.startswith("oci"):
        runtime = next((name for name in ("runsc", "crun") if name in request.param), "runc")
        if (reason := oci_images.why_not(runtime)) is not None:
            pytest.skip(reason)
        if request.param.endswith("fork") and (reason := why_no_forks(runtime)) is not None:
            pytest.skip(reason)
        oci_images.stored_image()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        plain = WRITABLE if "writable" in request.param else PLAIN
        spec = replace(plain, runtime=runtime, pids=512 if runtime == "runsc" else PLAIN.pids)
        waived = WAIVED_WITHOUT_ROOT if plain.is_writable else frozenset()
        start: Literal["run", "fork"] = "fork" if request.param.endswith("fork") else "run"
        launcher = OciLauncher(run, max_sandboxes=2, runtime=runtime, start=start, waived=waived)
        made = Candidate(launcher, lambda: [n for n in containers_below(tmp_path) if not _is_parent(n)], spec)
    elif request.param == "process":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        made = Candidate(
            ProcessLauncher(run, max_sandboxes=2),
            lambda: processes_below(tmp_path) + [p.name for p in tmp_path.glob(f"{PREFIX}*")],
        )
    else:
        fake = FakeLauncher(max_sandboxes=2, create_s=0.02)
        made = Candidate(fake, lambda: list(fake.live))
    yield made
    await made.launcher.aclose()
    assert made.left() == []
    assert containers_below(tmp_path) == [], "the parents of forked ones too"


@pytest.fixture
def channels(run: str) -> Iterator[Channels]:
    with Channels(run, Path("/tmp")) as channels:
        yield channels


@asynccontextmanager
async def server(channels: Channels) -> AsyncIterator[SandboxServer]:
    with channels.directory() as directory:
        async with SandboxServer(directory) as server:
            yield server


async def parked(server: SandboxServer) -> Confinement:
    async with asyncio.timeout(PARK_S):
        return await server.parked()


async def test_launched_sandbox_parks_on_its_channel(candidate: Candidate, channels: Channels) -> None:
    await candidate.launcher.check(candidate.spec)
    async with server(channels) as door, candidate.launcher.launch(candidate.spec, door.directory) as sandbox:
        seen = await parked(door)
        assert isinstance(seen, Confinement)
        assert sandbox.sandbox_id
        if not isinstance(candidate.launcher, ProcessLauncher):
            assert verify_confinement(seen, candidate.spec, untold_by(candidate.spec.runtime)) == []
        cpu_s = await sandbox.cpu_s()
        assert cpu_s is None or cpu_s > 0


async def test_sandbox_is_gone_when_the_block_is_left(candidate: Candidate, channels: Channels) -> None:
    async with server(channels) as door:
        async with candidate.launcher.launch(candidate.spec, door.directory):
            await parked(door)
        assert candidate.left() == []


async def test_sandbox_is_gone_after_an_error_in_the_block(candidate: Candidate, channels: Channels) -> None:
    async with server(channels) as door:
        with pytest.raises(ZeroDivisionError):
            async with candidate.launcher.launch(candidate.spec, door.directory):
                raise ZeroDivisionError
        assert candidate.left() == []


async def test_sandbox_ends_by_itself_when_the_orchestrator_hangs_up(
    candidate: Candidate, channels: Channels
) -> None:
    with channels.directory() as directory:
        async with candidate.launcher.launch(candidate.spec, directory) as sandbox:
            async with SandboxServer(directory) as door:
                await parked(door)
            async with asyncio.timeout(PARK_S):
                ended = await sandbox.exited()
            assert ended.exit_code == 1
            assert not ended.oom_killed
            assert await sandbox.exited() == ended


async def test_waiting_for_the_end_can_be_given_up_and_taken_up_again(
    candidate: Candidate, channels: Channels
) -> None:
    async with server(channels) as door, candidate.launcher.launch(candidate.spec, door.directory) as sandbox:
        await parked(door)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await sandbox.exited()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.1, 0.2, 0.4])
async def test_cancelled_launch_leaves_nothing(candidate: Candidate, channels: Channels, after_s: float) -> None:
    async def use(door: SandboxServer) -> None:
        async with candidate.launcher.launch(candidate.spec, door.directory):
            await asyncio.Event().wait()

    async with server(channels) as door:
        task = asyncio.create_task(use(door))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # the second one does not cut the removal short
        with pytest.raises(asyncio.CancelledError):
            await task
        assert candidate.left() == []


@pytest.mark.slow
async def test_no_more_sandboxes_at_a_time_than_allowed(candidate: Candidate, channels: Channels) -> None:
    seen: list[int] = []

    async def use() -> None:
        async with server(channels) as door, candidate.launcher.launch(candidate.spec, door.directory) as sandbox:
            await parked(door)
            seen.append(running := len(alive | {sandbox.sandbox_id}))
            assert running <= 2
            alive.add(sandbox.sandbox_id)
            await asyncio.sleep(0.05)
            alive.discard(sandbox.sandbox_id)

    alive: set[str] = set()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(use())
    assert len(seen) == 4


async def test_closing_twice_is_fine(candidate: Candidate, channels: Channels) -> None:
    async with server(channels) as door, candidate.launcher.launch(candidate.spec, door.directory):
        pass
    await candidate.launcher.aclose()
    await candidate.launcher.aclose()


async def test_process_launcher_hands_down_no_key_and_ends_what_code_left_running(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: Channels
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "canary-5b1d")
    launcher = ProcessLauncher(run, max_sandboxes=1)
    async with server(channels) as door:
        async with launcher.launch(PLAIN, door.directory):
            await parked(door)
            pids = processes_below(tmp_path)
            assert len(pids) >= 2
            for pid in pids:
                assert b"canary-5b1d" not in Path("/proc", pid, "environ").read_bytes()
        await eventually(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def containers_below(directory: Path) -> list[str]:
    """Names of the containers that an OCI runtime has for launchers with directories there, and of bundles."""
    places = [*directory.glob(f"{PREFIX}*/state/[!.]*"), *directory.glob(f"{PREFIX}*/bundles/*")]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [*(place.name for place in places), *(mount for mount in mounts if mount.startswith(str(directory)))]


def _is_parent(name: str) -> bool:
    return name.startswith("parent-")


def processes_below(directory: Path) -> list[str]:
    """Pids of processes whose working directory is in `directory`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if os.readlink(f"/proc/{entry}/cwd").startswith(str(directory)):
                    found.append(entry)
            except OSError:
                continue
    return found
