"""Nodes of a real Ray cluster that are killed at random turns cost no completion that they told of."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.fakes import ray_cluster
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.ray_cluster import RayCluster
from tests.fakes.runs import essence, flags, lines, outcomes, place, run, running, until, write_tasks

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(ray_cluster.why_not() is not None, reason=ray_cluster.why_not() or ""),
    pytest.mark.timeout(600),
]
TASKS, GROUP, TURNS = 8, 2, 6
NODES = ("a", "b", "c")


def script(call: Call) -> str:
    """The state of the turns before is needed, and every step takes a while. The seed decides who is right."""
    turn = call.turn + 1
    if turn == 1:
        code = "import time\nseen = [1]\nprint(seen)"
    elif turn < TURNS:
        code = f"seen.append({turn})\ntime.sleep(0.5)\nprint(seen)"
    else:
        code = f"final_answer(sum(seen) * {call.seed % 2})"
    return f"Thought {turn}.\n<code>\n{code}\n</code>"


async def test_two_of_three_nodes_are_killed_in_the_midst_of_their_rollouts() -> None:
    dice = random.Random(3)
    same = {"group_size": GROUP, "warm_sandboxes": 0}
    with place() as home:
        async with ScriptedServer("vllm", script) as server, RayCluster(home / "c") as ray:
            (plain := home / "plain").mkdir()
            write_tasks(plain / "tasks.jsonl", TASKS)
            ended = await run(*flags(plain, server.base_url, **same), directory=plain)
            assert ended.code == 0, ended.stderr
            before = len(server.log.completed)
            for node in NODES:
                await ray.join(node)
            write_tasks(home / "tasks.jsonl", TASKS)
            where = {"cluster": "ray", "ray_address": ray.address, "max_concurrent_sandboxes": 3}
            async with running(*flags(home, server.base_url, **same, **where), directory=home) as started:
                for node in NODES[:2]:
                    seen = len(server.log.completed)
                    some = seen + dice.randrange(10, 24)
                    await until(lambda some=some: len(server.log.completed) >= some, "it works")
                    await asyncio.sleep(dice.uniform(0.0, 0.4))
                    await ray.nodes[node].kill()
                ended = await started.ended()
        assert ended.code == 0, ended.stderr
        assert essence(home / "run" / "groups.jsonl") == essence(plain / "run" / "groups.jsonl")
        record = lines(home / "run" / "rollouts.jsonl")
        continued = [one for line in record for one in line.get("continued", ())]
        sampled = len(server.log.completed) - before
        print(f"{len(continued)} went on; sampled {sampled} of {before};", dict(outcomes(home / "run")))
        assert len(continued) >= 2
        assert [one for one in continued if one["refused"]] == []
        # Only what was awaited, or on its way to the driver, when a node was killed is sampled again.
        assert sampled <= before + 2 * 2 * where["max_concurrent_sandboxes"]
        assert not Path(home / "run" / "under-way").exists()
        assert json.loads((home / "run" / "end.json").read_text())["continued"] == len(continued)
