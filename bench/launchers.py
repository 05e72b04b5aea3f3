"""Docker, the OCI runtime itself and forked sandboxes, in turns: the same rollouts, and what each costs.

Memory is what the whole machine has less of while many sandboxes are parked: shims, daemons, page tables and all.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.boxes import sandbox_spec
from bench.endpoint import RunningEndpoint, endpoint
from bench.machine import CpuMeter, cores
from bench.numbers import p50, ratio_of_pairs
from bench.program import program
from bench.report import Findings, Scale
from orchestrator.errors import EnvironmentUnusable
from orchestrator.host.sandbox import parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.hardening import NO_MEASURES
from orchestrator.launch.make import make_launcher
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.program import USUAL
from tests.fakes.oci_images import stored_image

TITLE = "Docker beside an OCI runtime without a daemon, and beside forked sandboxes"
DOCKER, OCI, FORK = KINDS = ("docker", "oci", "fork")
STEPS, COMPLETION_S = 4, 0.5
MB = 1_000_000
SETTLING_S = 3.0


async def measure(scale: Scale) -> Findings:
    if (reason := why_not_here(USUAL[0])) is not None:
        raise EnvironmentUnusable(reason)
    await asyncio.to_thread(stored_image)
    found = Findings()
    await _starts(found, scale)
    await _starts_at_once(found, scale)
    await _jobs(found, scale)
    await _actions(found, scale)
    await _memory(found, scale)
    return found


def _launcher(kind: str, run_id: str, sandboxes: int) -> Launcher:
    return make_launcher(
        OCI if kind == FORK else kind,
        run_id,
        max_sandboxes=sandboxes,
        waived=NO_MEASURES,
        allow_localhost_tcp=False,
        oci_runtime=USUAL[0],
        start="fork" if kind == FORK else "run",
        advise=lambda line: None,
    )


async def _starts(found: Findings, scale: Scale) -> None:
    parked: dict[str, list[float]] = {kind: [] for kind in KINDS}
    removed: dict[str, list[float]] = {kind: [] for kind in KINDS}
    run_id, spec = secrets.token_hex(8), sandbox_spec()
    async with AsyncExitStack() as stack:
        channels = stack.enter_context(Channels(run_id))
        launchers = {kind: _launcher(kind, f"{run_id}-{kind}", 1) for kind in parked}
        for number in range(-1, scale.pick(1, 20, 60)):
            for kind in KINDS if number % 2 else reversed(KINDS):
                started = time.perf_counter()
                async with parked_sandbox(spec, launchers[kind], channels.directory):
                    there = time.perf_counter()
                if number >= 0:  # the first of each opens what all share
                    parked[kind].append(there - started)
                    removed[kind].append(time.perf_counter() - there)
        for launcher in launchers.values():
            await launcher.aclose()
    for kind in parked:
        found.add(f"create to parked, {kind}, p50", p50(parked[kind]) * 1e3, "ms")
    _ratio(found, scale, "create to parked", parked, {(OCI, DOCKER): 0.6, (FORK, DOCKER): 0.2, (FORK, OCI): 0.35})
    for kind in removed:
        found.add(f"removal, {kind}, p50", p50(removed[kind]) * 1e3, "ms")
    found.samples |= {f"parked, {kind}, s": values for kind, values in parked.items()}


async def _starts_at_once(found: Findings, scale: Scale) -> None:
    """From the first call to the last sandbox that is parked, after one that opens what all share."""
    many = scale.pick(4, 100, 100)
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(scale.pick(1, 3, 5)):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            took[kind].append((await _parked(kind, many)).took_s)
    for kind, values in took.items():
        most = {"at_most": 2.0} if kind == FORK and scale is not Scale.TINY else {}
        found.add(f"{many} started at once, {kind}", p50(values), "s", **most)
    _ratio(found, scale, f"{many} started at once", took, {(OCI, DOCKER): None, (FORK, OCI): None})


async def _jobs(found: Findings, scale: Scale) -> None:
    groups, group_size = scale.pick((1, 2), (8, 8), (8, 8))
    rollouts = groups * group_size
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    own: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with endpoint(scale.pick(0.05, COMPLETION_S, COMPLETION_S), STEPS) as server:
        meter = await CpuMeter.open(scale.pick(0.2, 3.0, 10.0), [server.pid])
        for pair in range(scale.pick(1, 3, 6)):
            for kind in KINDS if pair % 2 else reversed(KINDS):
                wall_s, cpu_s, inside_s = await _job(kind, server, meter, groups, group_size)
                wall[kind].append(wall_s)
                cpu[kind].append(cpu_s / rollouts)
                own[kind].append(inside_s / rollouts)
    for kind in wall:
        found.add(f"{rollouts} rollouts, {kind}", p50(wall[kind]), "s")
    _ratio(found, scale, f"{rollouts} rollouts", wall, {(OCI, DOCKER): None, (FORK, OCI): None})
    for kind in own:
        found.add(f"CPU in the sandbox per rollout, {kind}", p50(own[kind]), "CPU-s", note="from its cgroup")
    for kind in cpu:
        value = None if meter.trouble else p50(cpu[kind])
        found.add(f"CPU per rollout, {kind}", value, "CPU-s", note=meter.trouble or "everything included")
    if not meter.trouble:
        _ratio(found, scale, "CPU per rollout", cpu, {(OCI, DOCKER): 0.65, (FORK, OCI): 0.5})
        for kind in KINDS:
            least = {"at_least": 40_000} if kind == FORK and scale is not Scale.TINY else {}
            found.add(f"rollouts per core-hour, {kind}", 3600 / p50(cpu[kind]), "", **least)
    found.samples |= {f"{rollouts} rollouts, {kind}, s": values for kind, values in wall.items()}
    found.samples |= {f"CPU per rollout, {kind}": values for kind, values in cpu.items()}


def _ratio(
    found: Findings,
    scale: Scale,
    what: str,
    values: dict[str, list[float]],
    pairs: dict[tuple[str, str], float | None],
) -> None:
    """`pairs`: of which kinds, and the most that the ratio may be."""
    for (one, other), at_most in pairs.items():
        bound = {} if at_most is None or scale is Scale.TINY else {"at_most": at_most}
        name = f"{what}, {one} / {other}"
        found.add(name, ratio_of_pairs(values[one], values[other]), "x", note="median of pairs", **bound)


async def _actions(found: Findings, scale: Scale) -> None:
    """What is added to the model's own time: trajectories one after the other, of a model that takes none, from
    the end of the first to that of the last."""
    trajectories = scale.pick(2, 4, 8)
    for actions in (50, 150):
        wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with endpoint(0.0, actions) as server:
            for turn in range(scale.pick(1, 2, 3)):
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    sizes = ("--groups", trajectories, "--group-size", 1, "--sandboxes", 1, "--steps", actions)
                    wall[kind].append(await _trajectory_s(kind, server, trajectories, *sizes))
        for kind, values in wall.items():
            found.add(f"{actions} actions without a model's time, {kind}", p50(values), "s")
            hours = p50(values) * 1e6 / 3600
            found.add(f"worker-hours per million trajectories of {actions} actions, {kind}", hours, "h")


async def _trajectory_s(kind: str, server: RunningEndpoint, rollouts: int, *sizes: object) -> float:
    given = ("--endpoint", server.base_url, *_how(kind), *sizes, "--every", 1)
    async with program("bench.rollouts", *given) as ready:
        marks = [json.loads(line) for line in await ready.go()]
    if (ended := marks[-1]["outcomes"]) != {"finished": rollouts}:
        raise RuntimeError(f"the trajectories did not end as they should: {ended}")
    return float(marks[rollouts - 1]["wall_s"] - marks[0]["wall_s"]) / (rollouts - 1)


def _how(kind: str) -> tuple[str, ...]:
    return ("--launcher", "oci", "--start", "fork") if kind == FORK else ("--launcher", kind)


async def _job(
    kind: str, server: RunningEndpoint, meter: CpuMeter, groups: int, group_size: int
) -> tuple[float, float, float]:
    """(wall clock, CPU seconds of everything, CPU seconds inside the sandboxes)."""
    sizes = ("--groups", groups, "--group-size", group_size, "--sandboxes", 2 * group_size)
    async with program("bench.rollouts", "--endpoint", server.base_url, *_how(kind), *sizes) as ready:
        before, started = meter.now(), time.perf_counter()
        lines = await ready.go()
        wall_s, cpu_s = time.perf_counter() - started, meter.since(before)
    end = json.loads(lines[-1])
    if end["outcomes"] != {"finished": groups * group_size}:
        raise RuntimeError(f"the job did not end as it should: {end['outcomes']}")
    return wall_s, cpu_s, end["sandbox_cpu_s"]


async def _memory(found: Findings, scale: Scale) -> None:
    many = scale.pick(2, 32, 64)
    each: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pair in range(scale.pick(1, 3, 6)):
        for kind in KINDS if pair % 2 else reversed(KINDS):
            each[kind].append((await _parked(kind, many)).used_bytes / many)
    for kind, values in each.items():
        spread = f"{min(values) / MB:.1f} to {max(values) / MB:.1f}"
        note = f"{many} parked, all included; {spread} in {len(values)} turns"
        found.add(f"memory per parked sandbox, {kind}", p50(values) / MB, "MB", note=note)
    _ratio(found, scale, "memory per parked sandbox", each, {(OCI, DOCKER): None, (FORK, OCI): None})
    if scale is Scale.FULL:
        for kind, count in ((OCI, 500), (FORK, 2000)):
            parked = await _parked(kind, count)
            found.add(f"{count} live sandboxes, {kind}: memory of all", parked.used_bytes / MB, "MB")
            found.add(f"{count} live sandboxes, {kind}: until all were parked", parked.took_s, "s")


@dataclass(frozen=True)
class _Parked:
    """`used_bytes`: how much less memory the machine has."""

    took_s: float
    used_bytes: int


async def _parked(kind: str, many: int) -> _Parked:
    """Starts so many, none of which may fail, after one, and removes them."""
    run_id, spec = secrets.token_hex(8), sandbox_spec()
    launcher, room = _launcher(kind, run_id, many + 1), asyncio.Semaphore(2 * cores())
    async with AsyncExitStack() as stack:
        channels = stack.enter_context(Channels(run_id))
        stack.push_async_callback(launcher.aclose)
        await asyncio.sleep(SETTLING_S)
        async with parked_sandbox(spec, launcher, channels.directory):
            pass
        before = _available_bytes()
        sandboxes = await stack.enter_async_context(AsyncExitStack())

        async def park() -> None:
            async with room:
                await sandboxes.enter_async_context(parked_sandbox(spec, launcher, channels.directory))

        begun = time.perf_counter()
        await asyncio.gather(*(park() for _ in range(many)))
        took_s = time.perf_counter() - begun
        await asyncio.sleep(SETTLING_S)
        return _Parked(took_s, before - _available_bytes())


def _available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0
