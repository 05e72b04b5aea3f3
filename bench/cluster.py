"""What Ray costs: the way of a rollout to a node and back; and work that waits for the endpoint, on three nodes
beside one. A real Ray cluster on this machine, each node a process tree of its own.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from bench.endpoint import endpoint
from bench.machine import process_cpu_s
from bench.nodes import deliveries
from bench.numbers import p50, p99
from bench.report import Findings, Scale
from bench.rollouts import configuration, tasks
from orchestrator import Orchestrator
from orchestrator.cluster.order import Delivery, Order, Pulse, for_node
from orchestrator.rules.observer import Observer
from orchestrator.settings.config import Config
from tests.fakes.plans import a_plan
from tests.fakes.ray_cluster import RayCluster, why_not
from tests.fakes.runs import place

TITLE = "a run over the nodes of a Ray cluster"
AT_ONCE = 64
GROUP_SIZE, SANDBOXES, TURNS = 8, 4, 4


class Echo:
    """In the place of a host actor: gives back a finished attempt of 4,000 tokens at once."""

    def __init__(self) -> None:
        self._delivery: Delivery = pickle.loads(deliveries()[0])

    async def carry_out(self, order: Order) -> Delivery:
        return self._delivery

    async def pulse(self) -> Pulse:
        return Pulse()


async def measure(scale: Scale) -> Findings:
    found = Findings()
    if (why := why_not()) is not None:
        found.notes.append(f"not measured: {why}")
        return found
    await _overhead(found, scale)
    await _three_beside_one(found, scale)
    return found


async def _overhead(found: Findings, scale: Scale) -> None:
    from orchestrator.cluster.link import RayLink

    calls = scale.pick(20, 1000, 5000)
    with place() as home:
        async with RayCluster(home / "c") as cluster:
            await cluster.join("a")
            link = RayLink(cluster.address)
            await link.open()
            (seen,) = await link.nodes()
            with patch("orchestrator.cluster.link.HostActor", Echo):
                host = await link.start(seen.node_id)
            alone, busy = [], asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with busy:
                    await host.carry_out(Order(for_node(a_plan(number))))

            for number in range(min(calls, 200)):
                began = time.perf_counter()
                await one(number)
                alone.append(time.perf_counter() - began)
            began, ours, theirs = time.perf_counter(), time.process_time(), _cpu_s(cluster)
            await asyncio.gather(*(one(number) for number in range(calls)))
            wall_s = time.perf_counter() - began
            ours, theirs = time.process_time() - ours, _cpu_s(cluster) - theirs
            await link.close()
    promise = scale is not Scale.TINY
    found.samples["there and back, s"] = alone
    found.add(
        "there and back, one at a time, p50",
        p50(alone) * 1e3,
        "ms",
        note=f"p99 {p99(alone) * 1e3:.1f}; the attempt has 4,000 tokens",
        **({"at_most": 10.0} if promise else {}),
    )
    found.add(f"there and back, {AT_ONCE} at a time", calls / wall_s, "/s")
    found.add("CPU of the driver", ours / calls * 1e3, "ms per rollout", **({"at_most": 10.0} if promise else {}))
    found.add(
        "CPU of driver, node and head together",
        (ours + theirs) / calls * 1e3,
        "ms per rollout",
        **({"at_most": 5.0} if promise else {}),
    )


def _cpu_s(cluster: RayCluster) -> float:
    """Of all processes of the cluster. One that ends meanwhile is not counted."""
    total = 0.0
    for pid in cluster.processes():
        try:
            total += process_cpu_s(pid)
        except OSError:
            continue
    return total


async def _three_beside_one(found: Findings, scale: Scale) -> None:
    groups, group_size = scale.pick((1, 2), (6, GROUP_SIZE), (12, GROUP_SIZE))
    delay_s = scale.pick(0.05, 1.5, 1.5)
    walls = {}
    with endpoint(delay_s, TURNS) as server:
        for nodes in scale.pick((1, 2), (1, 3), (1, 3)):
            async with _cluster_of(nodes) as address:
                config = configuration(
                    server.base_url,
                    groups=groups,
                    group_size=group_size,
                    max_concurrent_sandboxes=SANDBOXES,
                    launcher="docker",
                )
                env = replace(config.env, cluster="ray", ray_address=address)
                walls[nodes] = await _wall_s(replace(config, env=env))
                rollouts = groups * group_size
                found.add(f"{rollouts} rollouts, {SANDBOXES} sandboxes on each of {nodes}", walls[nodes], "s")
    few, many = sorted(walls)
    found.add(f"{many} nodes beside {few}", walls[few] / walls[many], "x", note="all on this machine's cores")


@asynccontextmanager
async def _cluster_of(nodes: int) -> AsyncIterator[str]:
    with place() as home:
        async with RayCluster(Path(home) / "c") as cluster:
            for number in range(nodes):
                await cluster.join(f"n{number}")
            yield cluster.address


async def _wall_s(config: Config) -> float:
    """From the first task to the last group; opening and closing left out."""
    made = 0
    async with Orchestrator(config, Observer(say=lambda line: None)) as orchestrator:
        started = time.perf_counter()
        async with aclosing(orchestrator.groups(tasks(config.env.total_steps))) as groups:
            async for group in groups:
                made += group.dropped is None
        wall_s = time.perf_counter() - started
    if made != config.env.total_steps:
        raise RuntimeError(f"{made} of {config.env.total_steps} groups were made")
    return wall_s
