"""Checks what makes sandboxes (Docker or an OCI runtime), its features and the image, and starts one sandbox as a
run would."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.doctor.finding import Finding, fail, ok, warn
from orchestrator.doctor.machine import check_room
from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable, RolloutError
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.host.sandbox import parked_sandbox
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.facts import advice, engine_problem, image_problem, is_rootless, missing_features
from orchestrator.launch.image.build import is_current
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.make import make_launcher
from orchestrator.launch.names import LABEL_PROJECT, PROJECT, is_path
from orchestrator.launch.oci.machine import advice as oci_advice
from orchestrator.launch.oci.machine import (
    does_not_fit,
    missing_limits,
    missing_ranges,
    runtime_version,
    why_no_containers,
    why_no_forks,
    why_not_here,
)
from orchestrator.launch.oci.program import find_oci_runtime
from orchestrator.launch.oci.store import ImageStore
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.types import SandboxSpec

START_TIMEOUT_S = 120.0
LIMITS_CURE = (
    "a rootless Engine limits it where the machine has cgroup v2 and delegates it to its user; or waive it: "
    "--env.waive_hardening"
)


async def check_sandboxes(
    settings: SandboxSettings, spec: SandboxSpec, *, localhost_tcp: bool = False, image_comes: bool = False
) -> AsyncIterator[Finding]:
    """Checks what the launcher of the settings needs for a sandbox like `spec`. `localhost_tcp`: it has TCP on its
    loopback device. `image_comes`: the image is not looked for here."""
    if settings.launcher == "process":
        yield warn("sandboxes", "the process launcher gives no isolation of ours: nothing to check")
        return
    notes: list[str] = []
    try:
        kind = await launcher_kind(settings, notes)
    except EnvironmentUnusable as error:
        yield fail("launchers", str(error))
        return
    for note in notes:
        yield warn("launchers", note)
    settings = replace(settings, launcher="docker" if kind == "auto" else kind)
    engine = Engine(threads=2)
    usable = True
    docker = settings.launcher == "docker"
    check = _check_engine(engine, settings, spec, image_comes) if docker else _check_oci(settings, spec)
    try:
        async for finding in check:
            usable = usable and finding.level != "fail"
            yield finding
        yield await _other_launcher(settings, engine)
    finally:
        await engine.aclose()
    if usable and image_comes:
        yield warn("sandbox", "no sandbox was started: the image is not here")
    elif usable:
        yield await _check_start(settings, spec, localhost_tcp)


async def _check_engine(
    engine: Engine, settings: SandboxSettings, spec: SandboxSpec, image_comes: bool
) -> AsyncIterator[Finding]:
    try:
        await engine.open()
        info = await engine.info()
        image = {} if image_comes else await engine.image(spec.image)
    except (DockerError, EnvironmentUnusable) as error:
        yield fail("docker", str(error))
        return
    if (reason := engine_problem(info)) is not None:
        yield fail("docker", reason)
        return
    runtimes = ", ".join(sorted(info.get("Runtimes") or ()))
    kind = ", rootless" if is_rootless(info) else ""
    yield ok("docker", f"{info.get('ServerVersion')}{kind} on {info.get('KernelVersion')}, runtimes {runtimes}")
    for finding in _limits(info, frozenset(settings.waive_hardening)):
        yield finding
    if (problem := image_problem(spec, info, image)) is not None:
        yield fail("image", problem)
    elif image:
        labels = (image.get("Config") or {}).get("Labels") or {}
        yield await asyncio.to_thread(_check_image, spec.image, labels, image["Size"])
    for line in advice(info, spec, settings.max_concurrent_sandboxes):
        yield warn("machine", line)
    root = Path(info.get("DockerRootDir") or "/var/lib/docker")
    if await asyncio.to_thread(root.exists):  # otherwise the Engine runs on another machine
        yield check_room("disk", root, "run `docker system prune`, or make room")


def _limits(info: Mapping[str, Any], waived: frozenset[str]) -> Iterator[Finding]:
    missing = missing_features(info, waived)
    for line in missing:
        yield fail("limits", f"{line}; {LIMITS_CURE if is_rootless(info) else 'waive it: --env.waive_hardening'}")
    if missing:
        return
    if unlimited := ", ".join(line.partition(":")[0] for line in missing_features(info)):
        yield warn("limits", f"not limited, as you waived it: {unlimited}")
    else:
        version = info.get("CgroupVersion") or "?"
        yield ok("limits", f"memory, swap, CPU and processes by cgroup v{version}; system calls by seccomp")


async def _check_oci(settings: SandboxSettings, spec: SandboxSpec) -> AsyncIterator[Finding]:
    store = ImageStore()
    try:
        program = find_oci_runtime(settings.oci_runtime)
        version = await asyncio.to_thread(runtime_version, program)
    except EnvironmentUnusable as error:
        yield fail("runtime", str(error))
        return
    yield ok("runtime", f"{version}, {program}")
    if reason := why_no_containers():
        yield fail("runtime", reason)
    reason = why_no_forks(settings.oci_runtime)
    if settings.start == "fork" and reason:
        yield fail("forks", reason)
    elif settings.start == "run" and not reason:
        yield ok(
            "forks", "sandboxes can be forked here, which takes half the CPU time: --env.start fork, docs/oci.md"
        )
    waived = frozenset(settings.waive_hardening)
    missing = [*missing_limits(waived), *missing_ranges(spec, waived)]
    for line in missing:
        yield fail("limits", f"{line}; or waive it: --env.waive_hardening")
    if not missing:
        unlimited = ", ".join(line.partition(":")[0] for line in (*missing_limits(), *missing_ranges(spec)))
        if unlimited:
            yield warn("limits", f"not limited, as you waived it: {unlimited}; system calls by seccomp")
        else:
            yield ok("limits", "memory, swap, CPU and processes by control groups; system calls by seccomp")
    if problem := does_not_fit(spec):
        yield fail("machine", problem)
    try:
        image = await asyncio.to_thread(store.find, spec.image)
    except EnvironmentUnusable as error:
        yield fail("image", str(error))
    else:
        if image is None and is_path(spec.image):
            yield ok("image", f"{spec.image}, unpacked when it is first used")
        elif image is None:
            yield fail("image", f"{spec.image} is not in {store.folder}: run `orchestrator image build --oci`")
        else:
            labels = image.config.get("Labels") or {}
            yield await asyncio.to_thread(_check_image, spec.image, labels, image.size_bytes)
    for line in oci_advice(spec, settings.max_concurrent_sandboxes, version):
        yield warn("machine", line)
    yield check_room("disk", store.folder, "set XDG_CACHE_HOME to a larger disk, or make room")


async def _other_launcher(settings: SandboxSettings, engine: Engine) -> Finding:
    """Whether the other launcher would work here."""
    if settings.launcher == "docker":
        reason = why_not_here(settings.oci_runtime)
        return ok("launchers", f"oci would not work here: {reason}" if reason else "oci would work here too")
    try:
        await engine.open()
        reason = engine_problem(await engine.info())
    except (DockerError, EnvironmentUnusable) as error:
        reason = str(error)
    if reason is not None:
        return ok("launchers", f"docker would not work here: {reason}")
    return ok("launchers", "docker would work here too")


def _check_image(name: str, labels: Mapping[str, str], size_bytes: int) -> Finding:
    size = f"{size_bytes / 1e6:.0f} MB"
    if is_current(labels, BuildContext.read(context_root()).digest, None):
        return ok("image", f"{name}, {size}")
    if labels.get(LABEL_PROJECT) != PROJECT:
        return ok("image", f"{name}, {size}, not made from ours")
    return warn("image", f"{name}, {size}, is not what this version builds: run `orchestrator image build`")


async def _check_start(settings: SandboxSettings, spec: SandboxSpec, localhost_tcp: bool) -> Finding:
    """Starts a sandbox, compares its confinement with what it must be, and removes it; if it is forked, a second
    one, too, as the first waits for its parent."""
    run_id, forks = secrets.token_hex(8), settings.start == "fork"
    ready_s: list[float] = []
    try:
        async with asyncio.timeout(START_TIMEOUT_S), AsyncExitStack() as stack:
            launcher = make_launcher(
                settings.launcher,
                run_id,
                max_sandboxes=1,
                waived=frozenset(settings.waive_hardening),
                allow_localhost_tcp=localhost_tcp,
                oci_runtime=settings.oci_runtime,
                start=settings.start,
                advise=lambda line: None,
            )
            stack.push_async_callback(launcher.aclose)
            channels = await asyncio.to_thread(Channels, run_id)
            stack.callback(channels.close)
            for _ in range(2 if forks else 1):
                begun = time.monotonic()
                async with parked_sandbox(spec, launcher, channels.directory):
                    ready_s.append(time.monotonic() - begun)
    except TimeoutError:
        return fail(
            "sandbox", f"no sandbox was ready within {START_TIMEOUT_S:g} s: see what the disk and the CPU do"
        )
    except (RolloutError, EnvironmentUnusable, ConfigError, OSError) as error:
        return fail("sandbox", str(error))
    how = "forked from a parent" if forks else "started"
    times = ", the next in ".join(f"{each:.2f} s" for each in ready_s)
    return ok("sandbox", f"{how}, confined as it must be, and removed; ready in {times}")
