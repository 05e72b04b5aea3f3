"""Many waiting sandboxes and one that floods its socket: the neighbours are served as before, none is refused.

`CROWD=100 pytest -s tests/integration/attacks/test_flood.py` measures with a hundred; what is asserted here holds
on a loaded machine too.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.launch.channels import Channels
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.server import SandboxServer
from tests.fakes.completers import FunctionCompleter
from tests.fakes.plans import a_plan, some_limits
from tests.fakes.runs import ROOT
from tests.fakes.unprivileged import without_override
from tests.integration.attacks.crowd import FLOODS, QUIET

pytestmark = pytest.mark.long

CROWD = int(os.environ.get("CROWD", "16"))
ROUNDS = 6
ENDPOINT_S = 0.5
GUARD_S = 240.0


class SlowEndpoint(FunctionCompleter):
    """Answers in ENDPOINT_S, as many at a time as there are."""

    def __init__(self) -> None:
        super().__init__(lambda request: "Thought\n<code>\n1\n</code>")

    async def sample(self, request):  # type: ignore[no-untyped-def]
        await asyncio.sleep(ENDPOINT_S)
        return await super().sample(request)


async def served(directory: Path, ready: asyncio.Event) -> None:
    """One rollout as the orchestrator carries it out: the socket closes when the lease has ended."""
    async with SandboxServer(directory) as server:
        lease = Lease(a_plan(limits=some_limits(completions=ROUNDS + 1)), SlowEndpoint(), None, {})
        server.assign(lease)
        ready.set()
        await lease.ended()


async def program(*arguments: object) -> asyncio.subprocess.Process:
    """Without the capability of root that nobody in a sandbox has."""
    return await asyncio.create_subprocess_exec(
        *without_override(),
        *(sys.executable, "-m", "tests.integration.attacks.crowd", *map(str, arguments)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def crowd(channels: Channels, count: int) -> AsyncIterator[list[Path]]:
    """`count` sockets that are served."""
    async with AsyncExitStack() as stack:
        paths, events = [], []
        tasks = []
        for _ in range(count):
            paths.append(stack.enter_context(channels.directory()))
            events.append(asyncio.Event())
            tasks.append(asyncio.create_task(served(paths[-1], events[-1])))
        await asyncio.gather(*(event.wait() for event in events))
        try:
            yield [path / "s" for path in paths]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def added_latencies(channels: Channels, flood: str) -> tuple[list[float], str]:
    """(seconds beyond the endpoint's that each neighbour's step took, what the flood says of itself)."""
    async with asyncio.timeout(GUARD_S), crowd(channels, CROWD + 1) as sockets:
        waiting = await program("wait", ROUNDS, *sockets[1:])
        assert waiting.stdout is not None
        for _ in range(CROWD):
            assert await waiting.stdout.readline() == b"ready\n"
        flooding = await program("flood", flood, sockets[0])
        taken, refusals = json.loads(await waiting.stdout.readline())
        await waiting.wait()
        told = (await flooding.communicate())[0].decode().strip()
    assert refusals == []
    assert len(taken) == CROWD * ROUNDS
    return [seconds - ENDPOINT_S for seconds in taken], told


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@pytest.mark.timeout(900)
async def test_a_flood_neither_delays_nor_refuses_the_neighbours() -> None:
    """Measured beside a neighbour that is idle, and beside one that uses its CPU and leaves its socket alone."""
    with Channels("flood") as channels:
        p95s: dict[str, float] = {}
        told: list[str] = []
        usual = 0.0
        for kind in (*QUIET, *FLOODS):
            added, count = await added_latencies(channels, kind)
            p95s[kind] = max(p95(added), 1e-3)
            told.append(f"{kind}: p95 {p95s[kind] * 1e3:.1f} ms, median {statistics.median(added) * 1e3:.1f} ms")
            if kind in FLOODS:
                told[-1] += f", {count} times"
                told[-1] += "".join(f", {p95s[kind] / p95s[quiet]:.1f} x {quiet}" for quiet in QUIET)
                # The median: a machine that stalls for a second spoils every twentieth value, and proves nothing.
                assert statistics.median(added) < 10 * max(usual, 0.05), told
            elif kind == "idle":
                usual = statistics.median(added)
        print(f"{CROWD} neighbours, endpoint {ENDPOINT_S} s, added:", *told, sep="\n  ")
