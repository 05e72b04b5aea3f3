"""One run over three nodes, each with a network and a Docker Engine of its own: one is killed, one stands still
for a minute."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import docker
import pytest

from tests.fakes import own_engine, ray_cluster
from tests.fakes.inference import Reply, Script, ScriptedServer, by_task
from tests.fakes.own_engine import OwnEngine
from tests.fakes.ray_cluster import Network, RayCluster
from tests.fakes.runs import essence, flags, lines, outcomes, place, run, running, until, whole_lines, write_tasks

_WHY_NOT = ray_cluster.why_not(networks=True) or own_engine.why_not()

pytestmark = [
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
    pytest.mark.timeout(900),
]
TASKS, GROUP_SIZE, SANDBOXES = 8, 8, 4
# Long naps where nodes fail: there is time to kill a node, and the run outlasts the one that stands still. Else
# the next run on that node would be the one to remove what it left.
NAP_S = 10
PAUSED_S = 60
NODES = ("a", "b", "c")


def replies() -> Script:
    """A right answer or a wrong one, by the rollout's seed, after a step that sleeps as long as the task says."""
    nap = (
        "Thought: I wait.\n<code>\nimport os, time\ntime.sleep(int(os.environ['NAP_S']))\nprint('awake')\n</code>"
    )
    tasks = {
        f"of q{n}!": [
            [Reply(nap), Reply(f"Thought: {answer}.\n<code>\nfinal_answer({answer})\n</code>")]
            for answer in (n, -1)
        ]
        for n in range(TASKS)
    }
    return by_task(tasks, by="seed")


@asynccontextmanager
async def engines(home: Path) -> AsyncIterator[dict[str, OwnEngine]]:
    """Of all nodes, by name. They have no image."""
    started = {}
    async with AsyncExitStack() as stack:
        for name in NODES:
            (directory := home / f"e{name}").mkdir()
            started[name] = await stack.enter_async_context(OwnEngine(directory))
        yield started


def living(engine: OwnEngine) -> list[str]:
    client = docker.APIClient(engine.url)
    try:
        return [container["Id"] for container in client.containers()]
    finally:
        client.close()


def write_naps(path: Path, nap_s: int) -> None:
    """Tasks whose rollouts sleep for so long."""
    rows = [json.loads(line) for line in write_tasks(path, TASKS).read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "env": {"NAP_S": str(nap_s)}}) + "\n" for row in rows))


async def test_the_groups_are_those_of_one_node_whatever_becomes_of_the_others() -> None:
    with place() as home, Network() as network:
        write_naps(home / "tasks.jsonl", 0)
        same = {"group_size": GROUP_SIZE, "max_concurrent_sandboxes": SANDBOXES}
        async with ScriptedServer("vllm", replies()) as server:
            recorded = await run(
                *flags(home, server.base_url, **{**same, "max_concurrent_sandboxes": 32}), directory=home
            )
        assert recorded.code == 0, recorded.stderr
        replay = f"replay:{home / 'run'}"
        (one := home / "one").mkdir()
        write_naps(one / "tasks.jsonl", 0)
        ended = await run(
            *flags(one, replay, launcher="docker", **{**same, "max_concurrent_sandboxes": 16}), directory=one
        )
        assert ended.code == 0, ended.stderr
        (three := home / "3").mkdir()
        write_naps(three / "tasks.jsonl", NAP_S)
        async with engines(home) as engine, RayCluster(home / "c", network.address) as ray:
            for name in NODES:
                await ray.join(name, network=network.add(), environ={"DOCKER_HOST": engine[name].url})
            where = {"cluster": "ray", "ray_address": ray.address, "launcher": "docker"}
            rollouts = three / "run" / "rollouts.jsonl"
            async with running(*flags(three, replay, **same, **where), directory=three) as started:
                await until(lambda: whole_lines(rollouts) >= 6, "it runs")
                await ray.nodes["a"].kill()
                await until(lambda: whole_lines(rollouts) >= 12, "it goes on")
                ray.nodes["b"].signal(signal.SIGSTOP)
                await asyncio.sleep(PAUSED_S)
                ray.nodes["b"].signal(signal.SIGCONT)
                ended = await started.ended()
            assert ended.code == 0, ended.stderr
            assert f"at most {3 * SANDBOXES} sandboxes on 3 nodes" in ended.stderr
            assert "node a is lost" in ended.stderr
            assert "node b pauses, its rollouts go elsewhere: it does not answer" in ended.stderr
            assert "node b works again" in ended.stderr
            await until(lambda: not living(engine["a"]), "the sandboxes of the killed node end by themselves")
            await until(lambda: not engine["b"].containers(), "nothing is left on the one that stood still")
            assert engine["c"].containers() == []
        told = lines(rollouts)
        assert outcomes(three / "run")["finished"] == TASKS * GROUP_SIZE, outcomes(three / "run")
        why = {line["reason"] for line in told if line["outcome"] not in ("finished", "sandbox_lost")}
        assert not why, why
        assert max(Counter(line["rollout_id"] for line in told).values()) == 1
        assert {line["node"] for line in told} == set(NODES)
        assert essence(three / "run" / "groups.jsonl") == essence(one / "run" / "groups.jsonl")
