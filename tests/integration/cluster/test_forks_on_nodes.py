"""Sandboxes that are forked on the nodes of a real Ray cluster, a parent and a node of which are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.launch.channels import PREFIX
from orchestrator.launch.oci.leftovers import remove_containers
from orchestrator.launch.oci.machine import why_no_forks
from tests.fakes import oci_images, ray_cluster
from tests.fakes.inference import ScriptedServer
from tests.fakes.ray_cluster import RayCluster, RayNode
from tests.fakes.runs import (
    answers,
    essence,
    flags,
    lines,
    outcomes,
    place,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)
from tests.fakes.trainers import free_port

_WHY_NOT = ray_cluster.why_not() or oci_images.why_not() or why_no_forks("runc")
pytestmark = [
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
    pytest.mark.timeout(600),
]
TASKS, GROUP, NODES = 6, 3, ("a", "b")


def parents(node: RayNode) -> list[int]:
    """Their pids 1: what the keeper has started."""
    found = (pid for pid in node.tree() if b"boot/parent.py" in command(pid))
    return [pid for pid in found if b"keeper.py" in command(above(pid))]


def command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def above(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        told = [line.rpartition(" ") for line in answer.read().decode().splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in told}


def kept(node: RayNode) -> list[Path]:
    """Folders of launchers and of channels."""
    return [*(node.home / "t").glob(f"{PREFIX}*")]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[RayCluster]:
    """Nobody of a killed node's PID namespace comes back to remove what was left."""
    async with AsyncExitStack() as stack:
        stack.callback(lambda: [remove_containers(each) for node in ray.nodes.values() for each in kept(node)])
        ray = await stack.enter_async_context(RayCluster(folder))
        yield ray


async def test_a_killed_parent_and_a_killed_node_cost_time_and_nothing_else() -> None:
    oci_images.stored_image()
    port = free_port()
    with place() as home:
        (here := home / "here").mkdir()
        for folder in (home, here):
            write_tasks(folder / "tasks.jsonl", TASKS)
        async with ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server, cluster(home / "c") as ray:
            ended = await run(*flags(here, server.base_url, group_size=GROUP), directory=here)
            assert ended.code == 0, ended.stderr
            a, b = [await ray.join(name, environ=oci_images.CACHE) for name in NODES]
            where = {"cluster": "ray", "ray_address": ray.address, "launcher": "oci", "start": "fork"}
            more = {"group_size": GROUP, "max_concurrent_sandboxes": 2, "metrics_port": port}
            rollouts = home / "run" / "rollouts.jsonl"
            async with running(*flags(home, server.base_url, **where, **more), directory=home) as started:
                await until(lambda: whole_lines(rollouts) > 0, "it runs")
                told: dict[str, float] = {}
                wanted = [f'orchestrator_sandbox_memory_bytes{{node="{name}"}}' for name in NODES]
                while not all(told.get(name, 0) > 1 << 20 for name in wanted):  # not while none lives
                    assert whole_lines(rollouts) < TASKS * GROUP, told
                    told |= await asyncio.to_thread(metrics, port)
                    await asyncio.sleep(0.05)
                (parent,) = parents(b)
                os.kill(parent, signal.SIGKILL)
                seen = whole_lines(rollouts)
                await until(lambda: whole_lines(rollouts) >= seen + 3, "it goes on")
                await until(lambda: bool(parents(b)), "there is another parent")
                processes = a.tree()
                await a.kill()
                ended = await started.ended()
            assert ended.code == 0, ended.stderr
            assert all(told[name] < 1 << 27 for name in wanted)
            for name in NODES:
                assert told[f'orchestrator_parents{{node="{name}"}}'] == 1
                assert told[f'orchestrator_forks_total{{node="{name}"}}'] >= 1
            assert "node a is lost" in ended.stderr
            assert kept(b) == parents(b) == []
            await until(lambda: not any(map(command, processes)), "with its node all of it ends")
            # Nobody of its PID namespace comes back; where it is a machine's own, the next run does this.
            removed = [remove_containers(folder) for folder in kept(a)]
            assert sum(count for count, _ in removed) >= 1
            assert sum(resisting for _, resisting in removed) == 0
        counts = outcomes(home / "run")
        assert counts.pop("finished") == TASKS * GROUP
        assert set(counts) <= {"sandbox_lost", "launch_error"}
        assert {line["node"] for line in lines(rollouts)} == set(NODES)
        assert max(Counter(line["rollout_id"] for line in lines(rollouts)).values()) == 1
        assert essence(home / "run" / "groups.jsonl") == essence(here / "run" / "groups.jsonl")
