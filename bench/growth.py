"""Whether a rollout costs the same when many went before it: one run, its cost in pieces.

The orchestrator's own CPU and memory, which do not depend on what else the machine does; the endpoint answers
at once, 8 sandboxes at a time.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from bench.endpoint import endpoint
from bench.program import program
from bench.report import Findings, Scale

TITLE = "cost per rollout as a run grows"
MIB = 1 << 20


async def measure(scale: Scale) -> Findings:
    found = Findings()
    groups, group_size = scale.pick((2, 2), (10, 10), (100, 10))
    edges = scale.pick([2, 4], [10, 50, 100], [10, 100, 200, 500, 900, 1000])
    with endpoint(0.0, turns=4) as server:
        sizes = ("--groups", groups, "--group-size", group_size, "--every", scale.pick(1, 10, 10))
        async with program("bench.rollouts", "--endpoint", server.base_url, *sizes) as ready:
            marks = [json.loads(line) for line in await ready.go()]
    end = marks[-1]
    if end["outcomes"] != {"finished": groups * group_size}:
        raise RuntimeError(f"the run did not end as it should: {end['outcomes']}")
    at = {mark["rollouts"]: mark for mark in reversed(marks)}  # the earliest of each number
    found.samples = {
        name: [float(mark[name]) for mark in marks] for name in ("rollouts", "wall_s", "cpu_s", "rss_bytes")
    }
    costs = {}
    for low, high in pairwise(edges):
        costs[low, high] = _cost_s(at[low], at[high])
        found.add(f"rollouts {low + 1} to {high}: CPU in the orchestrator", costs[low, high] * 1e3, "CPU-ms each")
    if scale is Scale.FULL:
        found.add(
            "cost at 1,000 / cost at 100",
            _cost_s(at[900], at[1000]) / _cost_s(at[10], at[100]),
            "x",
            at_most=1.1,
            note="rollouts 901 to 1000 and 11 to 100",
        )
    elif scale is Scale.QUICK:
        found.add(
            "cost at 100 / cost at 50",
            costs[50, 100] / costs[10, 50],
            "x",
            note="rollouts 51 to 100 and 11 to 50; --full goes to 1,000",
        )
    grown = (at[edges[-1]]["rss_bytes"] - at[edges[0]]["rss_bytes"]) / MIB
    found.add(f"memory of the orchestrator, from rollout {edges[0]} to {edges[-1]}", grown, "MiB more")
    found.add("rollouts a second", end["rollouts"] / end["wall_s"], "/s", note="8 sandboxes, no model time")
    return found


def _cost_s(low: dict[str, Any], high: dict[str, Any]) -> float:
    return float(high["cpu_s"] - low["cpu_s"]) / int(high["rollouts"] - low["rollouts"])
