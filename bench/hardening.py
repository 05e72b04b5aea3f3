"""What the whole confinement costs: a bare container with it and one without, in turns."""

from __future__ import annotations

import asyncio
import statistics

from bench.boxes import bare_containers
from bench.machine import CpuMeter
from bench.numbers import p50, ratio_of_pairs
from bench.report import Findings, Scale

TITLE = "the cost of the hardening, beside a bare `docker run`"


async def measure(scale: Scale) -> Findings:
    found = Findings()
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    meter = await CpuMeter.open(scale.pick(0.2, 2.0, 5.0))
    with bare_containers() as bare:
        bare.run(hardened=True, sealed=True)
        for number in range(scale.pick(1, 16, 60)):
            for hardened in (True, False) if number % 2 else (False, True):
                before = meter.now()
                wall[hardened].append(
                    (await asyncio.to_thread(bare.run, hardened=hardened, sealed=hardened)).ended_s
                )
                cpu[hardened].append(meter.since(before))
    found.samples = {
        "hardened_s": wall[True],
        "plain_s": wall[False],
        "hardened_cpu_s": cpu[True],
        "plain_cpu_s": cpu[False],
    }
    found.add("with every measure, p50", p50(wall[True]) * 1e3, "ms")
    found.add("with none, p50", p50(wall[False]) * 1e3, "ms")
    found.add("with / without", ratio_of_pairs(wall[True], wall[False]), "x", note="median of pairs")
    for name, values in (("CPU with every measure, mean", cpu[True]), ("CPU with none, mean", cpu[False])):
        value = None if meter.trouble else statistics.mean(values) * 1e3
        found.add(name, value, "CPU-ms", note=meter.trouble or "the whole machine's, removal included")
    return found
