"""Images that are nothing like ours beside ours, in turns: create to parked, and what a parked sandbox takes. And
ours with a root that can be written to.

"Within the image" is how it was before the runtime was a mount: the same sandbox without it, as our image has it
all too. Memory is what the kernel counts for the sandbox alone: where each container has a file system of its own,
each has a copy of every file in the cache.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import docker
from docker.utils import kwargs_from_env

from bench.boxes import sandbox_spec
from bench.numbers import difference_of_pairs, p50, ratio_of_pairs
from bench.report import Findings, Scale
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.control_groups import control_groups, group_files
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.request import create_body
from orchestrator.launch.names import RUNTIME_MOUNT
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.program import USUAL
from orchestrator.types import STORAGE_INODES
from tests.fakes.foreign_images import archive, loaded
from tests.fakes.oci_images import stored_image

TITLE = "images unlike ours; the runtime as a mount"
MB = 1_000_000
OURS, FOREIGN, WRITABLE = "ours", "musl", "ours, writable"
WITHIN = "within the image"


async def measure(scale: Scale) -> Findings:
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        path = await asyncio.to_thread(archive, FOREIGN, Path(folder))
        with loaded(path, f"bench-{FOREIGN}:{secrets.token_hex(4)}") as image:
            await _starts(found, scale, "docker", DockerLauncher, image)
        if why_not_here(USUAL[0]) is None:
            await asyncio.to_thread(stored_image)
            await _starts(found, scale, "oci", OciLauncher, str(path))
    await _memory(found, scale)
    return found


@asynccontextmanager
async def _launcher(kind: type[Any]) -> AsyncIterator[tuple[Launcher, Channels]]:
    run_id = secrets.token_hex(8)
    waived = frozenset({"mounts", "id_ranges"})  # for WITHIN; for an ordinary user's WRITABLE
    launcher: Launcher = kind(run_id, max_sandboxes=64, waived=waived, advise=lambda line: None)
    with Channels(run_id) as channels:
        try:
            yield launcher, channels
        finally:
            await launcher.aclose()


async def _starts(found: Findings, scale: Scale, name: str, kind: type[Any], foreign: str) -> None:
    specs = {OURS: sandbox_spec(), FOREIGN: sandbox_spec(foreign)}
    if kind is OciLauncher:
        own = replace(sandbox_spec(), root="writable", storage_bytes=512 << 20, storage_inodes=STORAGE_INODES)
        specs[WRITABLE] = own
    parked: dict[str, list[float]] = {which: [] for which in specs}
    async with _launcher(kind) as (launcher, channels):
        for number in range(-1, scale.pick(1, 20, 60)):
            for which in specs if number % 2 else reversed(specs):
                started = time.perf_counter()
                async with parked_sandbox(specs[which], launcher, channels.directory):
                    if number >= 0:  # the first of each looks at the image
                        parked[which].append(time.perf_counter() - started)
    for which, values in parked.items():
        found.add(f"create to parked, {name}, {which}, p50", p50(values) * 1e3, "ms")
    ratio = ratio_of_pairs(parked[FOREIGN], parked[OURS])
    found.add(f"create to parked, {name}, {FOREIGN} / {OURS}", ratio, "x", at_most=1.1, note="median of pairs")
    if WRITABLE in parked:
        more = difference_of_pairs(parked[WRITABLE], parked[OURS]) * 1e3
        what = f"create to parked, {name}, {WRITABLE} - {OURS}"
        found.add(what, more, "ms", at_most=10.0, note="median of pairs")
    found.samples |= {f"parked, {name}, {which}, s": values for which, values in parked.items()}


async def _memory(found: Findings, scale: Scale) -> None:
    used: dict[str, list[float]] = {"as a mount": [], WITHIN: []}
    for _ in range(scale.pick(1, 3, 10)):
        for how, values in used.items():
            with _within() if how == WITHIN else _as_it_is():
                async with _launcher(DockerLauncher) as (launcher, channels), AsyncExitStack() as stack:
                    for _ in range(2):  # of the mount's files the first may have read some for all
                        parked = await stack.enter_async_context(
                            parked_sandbox(sandbox_spec(), launcher, channels.directory)
                        )
                    values.append(await asyncio.to_thread(_used_bytes, parked) / MB)
    for how, values in used.items():
        found.add(
            f"memory of a parked sandbox, docker, runtime {how}", p50(values), "MB", note="its control group"
        )
    mount, within = used.values()
    found.add("memory of a parked sandbox, mount / within", ratio_of_pairs(mount, within), "x", at_most=0.6)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _within() -> Iterator[None]:
    def without_mount(*arguments: Any) -> dict[str, Any]:
        body = create_body(*arguments)
        mounts = body["HostConfig"]["Mounts"]
        body["HostConfig"]["Mounts"] = [mount for mount in mounts if mount["Target"] != RUNTIME_MOUNT]
        return body

    with patch("orchestrator.launch.docker.launcher.create_body", without_mount):
        yield


def _used_bytes(parked: ParkedSandbox) -> int:
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        pid = engine.inspect_container(parked.sandbox.sandbox_id)["State"]["Pid"]
    groups = control_groups(pid, parked.sandbox.sandbox_id)
    file = next(group_files(groups, "memory", "memory.usage_in_bytes", "memory.current"))
    return int(file.read_text())
