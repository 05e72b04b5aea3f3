"""What it costs to be watched: the job of 64 rollouts with metrics that somebody scrapes, with spans that somebody
collects, with a live page that somebody looks at, and with none of them, in turns.

The orchestrator's own CPU is compared: nothing else does more. A share is of all CPU that a rollout takes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.endpoint import RunningEndpoint, endpoint
from bench.job import COMPLETION_S, OURS, STEPS
from bench.machine import CpuMeter
from bench.numbers import p50
from bench.program import program
from bench.report import Findings, Scale
from tests.fakes.collector import collecting
from tests.fakes.trainers import free_port

TITLE = "64 rollouts with metrics, with spans, and with a live page"
PAGE_S = 2.0  # as the page asks
SCRAPE_S = 1.0
MOST = {"metrics": 0.01, "spans": 0.03, "page": 0.01}  # of the CPU of a rollout


async def measure(scale: Scale) -> Findings:
    found = Findings()
    groups, group_size = scale.pick((1, 2), (8, 8), (8, 8))
    rollouts = groups * group_size
    own: dict[str, list[float]] = {"none": [], "metrics": [], "spans": [], "page": []}
    everything: list[float] = []
    with endpoint(scale.pick(0.05, COMPLETION_S, COMPLETION_S), STEPS) as server:
        meter = await CpuMeter.open(scale.pick(0.2, 3.0, 10.0), [server.pid])
        ways = list(own)
        for turn in range(scale.pick(1, 3, 10)):
            for way in ways if turn % 2 else reversed(ways):
                before = meter.now()
                own[way].append(await _job(way, server, groups, group_size) / rollouts)
                if way == "none":
                    everything.append(meter.since(before) / rollouts)
    found.samples = {f"{way}, CPU-s a rollout": values for way, values in own.items()}
    found.samples["everything, CPU-s a rollout"] = everything
    whole = p50(everything)
    found.add("CPU in the orchestrator per rollout", p50(own["none"]), "CPU-s")
    can_tell = not meter.trouble and whole > 0
    found.add("CPU per rollout, everything included", whole if can_tell else None, "CPU-s", note=meter.trouble)
    for way, most in MOST.items():
        added = p50([a - b for a, b in zip(own[way], own["none"], strict=True)])
        found.add(f"added by {way}, per rollout", added, "CPU-s", note=f"median of {len(own[way])} differences")
        bound = {} if scale is Scale.TINY else {"at_most": most}
        share = added / whole if can_tell else None
        found.add(f"added by {way} / everything", share, "x", note=meter.trouble, **bound)
    return found


async def _job(way: str, server: RunningEndpoint, groups: int, group_size: int) -> float:
    """CPU seconds of the orchestrator."""
    sizes = ("--endpoint", server.base_url, "--groups", groups, "--group-size", group_size)
    async with _watched(way) as more, program(OURS, *sizes, "--sandboxes", 2 * group_size, *more) as ready:
        end = json.loads((await ready.go())[-1])
    if end["outcomes"] != {"finished": groups * group_size}:
        raise RuntimeError(f"the job did not end as it should: {end['outcomes']}")
    return float(end["cpu_s"])


@asynccontextmanager
async def _watched(way: str) -> AsyncIterator[tuple[str, ...]]:
    """The arguments for one way of being watched, and who watches."""
    if way == "spans":
        async with collecting() as collector:
            yield "--otlp", collector.address
            if not collector.spans:
                raise RuntimeError("no span was sent")
    elif way == "metrics":
        port, seen = str(free_port()), [0]
        scraping = asyncio.create_task(_scrape(f"http://127.0.0.1:{port}/metrics", seen))
        try:
            yield "--metrics-port", port
        finally:
            scraping.cancel()
        if not seen[0]:
            raise RuntimeError("nothing was scraped")
    elif way == "page":
        with tempfile.TemporaryDirectory(prefix="bench") as folder:
            told, seen = Path(folder) / "page", [0]
            looking = asyncio.create_task(_look(told, seen))
            try:
                yield "--page", str(told)
            finally:
                looking.cancel()
        if not seen[0]:
            raise RuntimeError("nobody looked")
    else:
        yield ()


async def _look(told: Path, seen: list[int]) -> None:
    """Asks for what is new, as the page does."""
    version = 0
    while True:
        try:
            body = await asyncio.to_thread(_news, told, version)
        except OSError:  # it does not run yet, or no more
            await asyncio.sleep(0.05)
        else:
            version = json.loads(body)["version"]
            seen[0] += 1
            await asyncio.sleep(PAGE_S)


def _news(told: Path, version: int) -> bytes:
    address, _, token = told.read_text().partition("?")
    with urllib.request.urlopen(f"{address}update?{token}&since={version}", timeout=10) as answer:
        body: bytes = answer.read()
        return body


async def _scrape(url: str, seen: list[int]) -> None:
    while True:
        try:
            await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
        except OSError:  # it does not run yet, or no more
            await asyncio.sleep(0.05)
        else:
            seen[0] += 1
            await asyncio.sleep(SCRAPE_S)
