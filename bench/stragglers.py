"""Groups whose rollouts take unequally long: how much longer a run takes than one that leaves no slot idle.

Beside it: the same durations in the same order where none waits while a slot is free, and where one group goes
after the other. Real containers; only the endpoint decides how long a rollout takes.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Sequence
from contextlib import aclosing

from bench.endpoint import endpoint
from bench.numbers import long_tail, p50, work_conserving
from bench.report import Findings, Scale
from bench.rollouts import configuration, tasks
from orchestrator import Orchestrator
from orchestrator.rules.observer import Observer

TITLE = "rollouts of unequal length, beside an order that leaves no slot idle"
GROUP_SIZE, SLOTS, TURNS = 8, 8, 2
SEED = 18


async def measure(scale: Scale) -> Findings:
    found = Findings()
    groups = scale.pick(2, 8, 24)
    promise = {} if scale is Scale.TINY else {"at_most": 1.15}
    importlib.import_module("orchestrator.host.open")
    drawn = [
        long_tail(groups * GROUP_SIZE, scale.pick(0.1, 2.0, 2.0), SEED + run) for run in range(scale.pick(1, 2, 5))
    ]
    await _compare(found, "long tail", drawn, promise)
    one_each = [second for _ in range(groups) for second in _one_straggler(scale.pick(0.1, 1.2, 1.2), 5.0)]
    await _compare(found, "one of 8 takes 5 times as long", [one_each], {})
    found.notes.append(
        "The second job's rollouts last 1.2 s: on few cores it also waits for sandboxes to be made."
    )
    return found


def _one_straggler(usual_s: float, times: float) -> list[float]:
    """A group of which the first rollout is slow: the order that is worst where whole groups are waited for."""
    return [usual_s * times, *[usual_s] * (GROUP_SIZE - 1)]


async def _compare(
    found: Findings, name: str, drawn: Sequence[Sequence[float]], promise: dict[str, float]
) -> None:
    walls = [await _wall_s(durations) for durations in drawn]
    bounds = [work_conserving(durations, SLOTS) for durations in drawn]
    found.samples |= {f"{name}, s": walls, f"{name}, no slot idle, s": bounds}
    found.add(
        f"{name}: {len(drawn[0])} rollouts, {SLOTS} at a time", p50(walls), "s", note=f"of {len(walls)} runs"
    )
    found.add(f"{name}: no slot idle", p50(bounds), "s", note="the same durations, nothing else counted")
    found.add(f"{name}: one group after the other", p50([_by_group(d) for d in drawn]), "s", note="likewise")
    ratios = [wall / bound for wall, bound in zip(walls, bounds, strict=True)]
    found.add(f"{name}: wall clock / no slot idle", p50(ratios), "x", **promise)


def _by_group(durations: Sequence[float]) -> float:
    groups = [durations[n : n + GROUP_SIZE] for n in range(0, len(durations), GROUP_SIZE)]
    return sum(work_conserving(group, SLOTS) for group in groups)


async def _wall_s(durations: Sequence[float]) -> float:
    """From the first task to the last group; opening and closing left out."""
    groups = len(durations) // GROUP_SIZE
    with endpoint(turns=TURNS, durations_s=durations) as server:
        config = configuration(
            server.base_url,
            groups=groups,
            group_size=GROUP_SIZE,
            max_concurrent_sandboxes=SLOTS,
            launcher="docker",
        )
        async with Orchestrator(config, Observer(say=lambda line: None)) as orchestrator:
            await asyncio.sleep(2.0)  # the first sandboxes are made
            started, made = time.perf_counter(), 0
            async with aclosing(orchestrator.groups(tasks(groups))) as stream:
                async for group in stream:
                    made += group.dropped is None
            wall_s = time.perf_counter() - started
    if made != groups:
        raise RuntimeError(f"{made} of {groups} groups were made")
    return wall_s
