"""The job: 64 rollouts (8 groups of 8, 4 steps, 0.5 s per completion), two groups' worth at a time; and the same
with durations of a long tail.

Beside the architecture of the system before this one (`bench.predecessor`), in turns; CPU beside that of a bare
container that runs nothing.
"""

from __future__ import annotations

import asyncio
import json
import time

from bench.boxes import BareContainers, bare_containers
from bench.endpoint import RunningEndpoint, endpoint
from bench.machine import CpuMeter
from bench.numbers import long_tail, p50, ratio_of_pairs
from bench.program import program
from bench.report import Findings, Scale

TITLE = "64 rollouts, beside one plain process per agent"
STEPS, COMPLETION_S = 4, 0.5
SEED = 18
PREDECESSOR, OURS = "bench.predecessor", "bench.rollouts"


async def measure(scale: Scale) -> Findings:
    found = Findings()
    groups, group_size = scale.pick((1, 2), (8, 8), (8, 8))
    rollouts = groups * group_size
    wall: dict[str, list[float]] = {OURS: [], PREDECESSOR: []}
    cpu: dict[str, list[float]] = {OURS: [], PREDECESSOR: [], "bare": []}
    own: dict[str, list[float]] = {"orchestrator": [], "sandbox": []}
    with endpoint(scale.pick(0.05, COMPLETION_S, COMPLETION_S), STEPS) as server, bare_containers() as bare:
        meter = await CpuMeter.open(scale.pick(0.2, 3.0, 10.0), [server.pid])
        for pair in range(scale.pick(1, 2, 5)):
            cpu["bare"].append(await _bare(bare, meter, scale.pick(1, 12, 30)))
            for which in (OURS, PREDECESSOR) if pair % 2 else (PREDECESSOR, OURS):
                more = ("--sandboxes", 2 * group_size) if which is OURS else ()
                wall_s, cpu_s, lines = await _job(which, server, meter, groups, group_size, *more)
                wall[which].append(wall_s)
                cpu[which].append(cpu_s / rollouts)
                if which is OURS:
                    _check(end := json.loads(lines[-1]), rollouts)
                    own["orchestrator"].append(end["cpu_s"] / rollouts)
                    own["sandbox"].append(end["sandbox_cpu_s"] / rollouts)
    found.samples = {
        "ours, s": wall[OURS],
        "predecessor, s": wall[PREDECESSOR],
        "ours, CPU-s a rollout": cpu[OURS],
        "predecessor, CPU-s a rollout": cpu[PREDECESSOR],
        "bare container, CPU-s": cpu["bare"],
    }
    promise = scale is not Scale.TINY
    found.add(f"{rollouts} rollouts, each in a sealed container", p50(wall[OURS]), "s")
    found.add(f"{rollouts} rollouts, one plain process each", p50(wall[PREDECESSOR]), "s")
    found.add(
        "wall clock / predecessor's architecture",
        ratio_of_pairs(wall[OURS], wall[PREDECESSOR]),
        "x",
        note=f"median of {len(wall[OURS])} pairs",
        **({"at_most": 0.8} if promise else {}),
    )
    await _unequal(found, scale, groups, group_size)
    found.add("CPU in the orchestrator per rollout", p50(own["orchestrator"]), "CPU-s")
    found.add("CPU in the sandbox per rollout", p50(own["sandbox"]), "CPU-s", note="from its cgroup")
    if meter.trouble:
        found.add("CPU per rollout, everything included", None, "CPU-s", note=meter.trouble)
        return found
    found.add("CPU per rollout, everything included", p50(cpu[OURS]), "CPU-s", note="Engine, runc, kernel too")
    found.add("CPU per rollout, predecessor's architecture", p50(cpu[PREDECESSOR]), "CPU-s")
    found.add("CPU of a bare container", p50(cpu["bare"]), "CPU-s")
    found.add(
        "CPU per rollout / bare container",
        ratio_of_pairs(cpu[OURS], cpu["bare"]),
        "x",
        **({"at_most": 2.2} if promise else {}),
    )
    found.add("rollouts per core-hour", 3600 / p50(cpu[OURS]), "")
    return found


async def _unequal(found: Findings, scale: Scale, groups: int, group_size: int) -> None:
    """The same job where rollouts take unequally long, in the mean as long as before."""
    rollouts = groups * group_size
    drawn = long_tail(rollouts, scale.pick(0.1, 1.2, 1.2), SEED)
    wall: dict[str, list[float]] = {OURS: [], PREDECESSOR: []}
    for pair in range(scale.pick(1, 2, 5)):
        for which in (OURS, PREDECESSOR) if pair % 2 else (PREDECESSOR, OURS):
            with endpoint(
                turns=STEPS, durations_s=drawn
            ) as server:  # its own: the drawn ones from the first again
                meter = await CpuMeter.open(0.2, [server.pid])
                more = ("--sandboxes", 2 * group_size) if which is OURS else ()
                wall_s, _, lines = await _job(which, server, meter, groups, group_size, *more)
            if which is OURS:
                _check(json.loads(lines[-1]), rollouts)
            wall[which].append(wall_s)
    found.samples |= {"unequal, ours, s": wall[OURS], "unequal, predecessor, s": wall[PREDECESSOR]}
    found.add("unequal lengths: each in a sealed container", p50(wall[OURS]), "s")
    found.add("unequal lengths: one plain process each", p50(wall[PREDECESSOR]), "s")
    ratio = ratio_of_pairs(wall[OURS], wall[PREDECESSOR])
    found.add("unequal lengths: wall clock / predecessor's architecture", ratio, "x")


async def _job(
    which: str, server: RunningEndpoint, meter: CpuMeter, groups: int, group_size: int, *more: object
) -> tuple[float, float, list[str]]:
    """(wall clock, CPU seconds, what it printed) of one run, start of the program not included."""
    sizes = ("--endpoint", server.base_url, "--groups", groups, "--group-size", group_size)
    async with program(which, *sizes, *more) as ready:
        before, started = meter.now(), time.perf_counter()
        lines = await ready.go()
        return time.perf_counter() - started, meter.since(before), lines


async def _bare(bare: BareContainers, meter: CpuMeter, count: int) -> float:
    """CPU seconds of one, removal included."""
    before = meter.now()
    for _ in range(count):
        await asyncio.to_thread(bare.run, hardened=True)
    return meter.since(before) / count


def _check(end: dict[str, object], rollouts: int) -> None:
    if end["outcomes"] != {"finished": rollouts}:
        raise RuntimeError(f"the job did not end as it should: {end['outcomes']}")
