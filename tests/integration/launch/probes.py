"""Containers that run a test's own program in the place of the agent, under the launcher's full confinement.

`probe.py` from the socket's directory runs as pid 1, and what it prints is read from the container's log.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import docker
from docker.utils import kwargs_from_env

from orchestrator.launch.channels import Channels
from orchestrator.launch.contents import PYTHON
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.sandbox import DockerSandbox
from orchestrator.launch.names import CHANNEL_MOUNT, DEFAULT_IMAGE, LABEL_RUN
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.sandbox import OciSandbox
from tests.fakes import oci_images
from tests.fakes.plans import a_sandbox

PROBE = "probe.py"
PROGRAM = (PYTHON, "-u", f"{CHANNEL_MOUNT}/{PROBE}")
MIB = 1 << 20


@contextmanager
def probe_image(engine: docker.APIClient) -> Iterator[str]:
    """Built once per module; nothing of it stays."""
    tag = f"orchestrator-test-probe:{uuid.uuid4().hex[:8]}"
    dockerfile = f'FROM {DEFAULT_IMAGE}\nENTRYPOINT ["/bin/true"]\n'.encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        tar.addfile(entry, io.BytesIO(dockerfile))
    packed.seek(0)
    for line in engine.build(fileobj=packed, custom_context=True, tag=tag, rm=True, decode=True):
        assert "error" not in line, line
    try:
        yield tag
    finally:
        engine.remove_image(tag, force=True)


@asynccontextmanager
async def launcher_for(run: str, **options: Any) -> AsyncIterator[DockerLauncher]:
    """A launcher whose sandboxes run probes, closed at the end; no container of it remains."""
    launcher = DockerLauncher(run, **{"max_sandboxes": 4, "program": PROGRAM, **options})
    try:
        yield launcher
    finally:
        await launcher.aclose()
        assert await asyncio.to_thread(containers_of, run) == []


def containers_of(run: str) -> list[str]:
    """Names of all containers of a run, whatever state they are in."""
    engine = docker.APIClient(**kwargs_from_env())
    try:
        found = engine.containers(all=True, filters={"label": f"{LABEL_RUN}={run}"})
        return [name for container in found for name in container["Names"]]
    finally:
        engine.close()


@asynccontextmanager
async def probed(
    launcher: DockerLauncher, image: str, program: str, **limits: Any
) -> AsyncIterator[DockerSandbox]:
    """A container that runs `program`."""
    with Channels(launcher.run_id) as channels, channels.directory() as channel:
        (channel / PROBE).write_text(dedent(program))
        async with launcher.launch(a_sandbox(image=image, **limits), channel) as sandbox:
            yield sandbox


async def output_of(engine: docker.APIClient, sandbox: DockerSandbox) -> str:
    """Everything it printed, once it has ended."""
    async with asyncio.timeout(120):
        await sandbox.exited()
    raw: bytes = await asyncio.to_thread(engine.logs, sandbox.sandbox_id)
    return raw.decode()


async def answer_of(engine: docker.APIClient, launcher: DockerLauncher, image: str, program: str) -> Any:
    """What `program` prints as JSON in its last line."""
    async with probed(launcher, image, program) as sandbox:
        text = await output_of(engine, sandbox)
    return json.loads(text.strip().rpartition("\n")[2])


OPTIONS: dict[str, Any] = {}  # of all launchers of a test without an Engine


@asynccontextmanager
async def oci_launcher_for(run: str, **options: Any) -> AsyncIterator[OciLauncher]:
    """A launcher without an Engine, whose sandboxes run probes; closed at the end."""
    await asyncio.to_thread(oci_images.stored_image)
    launcher = OciLauncher(run, **{"max_sandboxes": 4, "program": PROGRAM, **OPTIONS, **options})
    try:
        yield launcher
    finally:
        await launcher.aclose()


@asynccontextmanager
async def oci_probed(launcher: OciLauncher, program: str, **limits: Any) -> AsyncIterator[OciSandbox]:
    """A container of the OCI runtime that runs `program`."""
    with Channels(launcher.run_id) as channels, channels.directory() as channel:
        (channel / PROBE).write_text(dedent(program))
        async with launcher.launch(a_sandbox(image=DEFAULT_IMAGE, **limits), channel) as sandbox:
            yield sandbox


async def answer_without_engine(run: str, program: str, **options: Any) -> Any:
    """As `answer_of`, without an Engine."""
    async with oci_launcher_for(run, **options) as launcher, oci_probed(launcher, program) as sandbox:
        async with asyncio.timeout(120):
            ended = await sandbox.exited()
        assert ended.exit_code == 0, ended
        return json.loads(sandbox.last_words.rpartition("\n")[2])


async def eventually(condition: Any, *, within_s: float = 120.0) -> None:
    """Waits until `condition()` holds; what it waits for has no event of its own."""
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


def write_owner(directory: Path, owner: str, run: str) -> None:
    """As a process of that name would have."""
    (directory / "owner").write_text(json.dumps({"owner": owner, "run": run}))
