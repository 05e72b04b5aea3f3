"""Many live sandboxes that wait for the endpoint: their memory, ours, and how late the event loop gets.

Every level keeps the sandboxes of the one before it: all are parked, measured, claimed, and then wait for their
first completion, which does not come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.boxes import sandbox_spec, surroundings
from bench.endpoint import endpoint
from bench.machine import open_files, rss_bytes
from bench.numbers import p50, p99
from bench.report import Findings, Scale
from orchestrator.completion.base import Completer, CompletionRequest, Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import RolloutError
from orchestrator.host.resources import Resources
from orchestrator.host.sandbox import ParkedSandbox
from orchestrator.launch.docker.sandbox import DockerSandbox
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.proxy.lease import Lease
from orchestrator.types import Completion
from tests.fakes.plans import a_plan
from tests.fakes.tokenizer import tokenizer_folder

TITLE = "live sandboxes that wait for the endpoint"
MB = 1_000_000
NEVER_S = 3600.0
LOOK_S = 0.01
WAITING_S = 300.0


class Counted:
    """A completer that knows how many requests are under way."""

    takes_ids = True
    guides = False

    def __init__(self, inner: Completer) -> None:
        self._inner = inner
        self.under_way = 0
        self._changed = asyncio.Event()

    async def reach(self, count: int) -> None:
        """Until so many are under way."""
        async with asyncio.timeout(WAITING_S):
            while self.under_way < count:
                self._changed.clear()
                await self._changed.wait()

    async def sample(self, request: CompletionRequest) -> Completion:
        self.under_way += 1
        self._changed.set()
        try:
            return await self._inner.sample(request)
        finally:
            self.under_way -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()


class Lag:
    """How late the loop is: a timer every 10 ms, and how much after its time it comes."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.late_s.append(max(0.0, time.perf_counter() - due))


async def measure(scale: Scale) -> Findings:
    found = Findings()
    levels = scale.pick([1, 2], [1, 8, 32], [1, 8, 32, 64, 128, 200])
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    starting, failed = Lag(), 0
    with endpoint(NEVER_S) as server:
        completer = Counted(await connect(Endpoint(server.base_url, "bench"), tokenizer, tokens="exact"))
        async with surroundings(completer, levels[-1]) as around, AsyncExitStack() as stack:
            stack.push_async_callback(completer.aclose)
            found.add("orchestrator, no sandbox", rss_bytes() / MB, "MB resident")
            fds = open_files()
            live: list[ParkedSandbox] = []
            for level in levels:
                async with starting.watched():
                    fresh = await _park(level - len(live) - failed, around, stack)
                failed = level - len(live) - len(fresh)
                parked = _memory(fresh)
                await _claim(fresh, len(live), completer, tokenizer, stack)
                live += fresh
                waiting = Lag()
                async with waiting.watched():
                    await asyncio.sleep(scale.pick(0.3, 5.0, 20.0))
                _level(found, level, parked, live, waiting, scale)
                if completer.under_way != len(live):
                    raise RuntimeError(f"of {len(live)} sandboxes only {completer.under_way} still wait")
            found.add("file descriptors per live sandbox", (open_files() - fds) / max(1, len(live)), "")
    found.add("failed starts", failed, f"of {levels[-1]}", at_most=0)
    found.add("loop lag while sandboxes start, p99", p99(starting.late_s) * 1e3, "ms")
    return found


async def _park(count: int, around: Resources, stack: AsyncExitStack) -> list[ParkedSandbox]:
    """As many as could be started, all at once."""

    async def one() -> ParkedSandbox | RolloutError:
        try:
            return await stack.enter_async_context(around.sandbox(sandbox_spec()))
        except RolloutError as error:
            return error

    parked = await asyncio.gather(*(one() for _ in range(count)))
    return [box for box in parked if isinstance(box, ParkedSandbox)]


async def _claim(
    boxes: list[ParkedSandbox], first: int, completer: Counted, tokenizer: HubTokenizer, stack: AsyncExitStack
) -> None:
    """Until each one's first request is at the endpoint."""
    for number, box in enumerate(boxes, first):
        lease = Lease(a_plan(rollout_id=f"live-{number}"), completer, tokenizer, {})
        stack.push_async_callback(lease.aclose)
        box.server.assign(lease)
    await completer.reach(first + len(boxes))


def _level(
    found: Findings, level: int, parked: list[float], live: list[ParkedSandbox], lag: Lag, scale: Scale
) -> None:
    promise = scale is not Scale.TINY
    found.samples |= {f"{level} live: parked, MB": parked, f"{level} live: lag, s": lag.late_s}
    found.add(
        f"{level} live: memory parked, p50",
        p50(parked) if parked else None,
        "MB",
        note="anonymous, by cgroup" if parked else "no control group in sight",
        **({"at_most": 45.0} if promise else {}),
    )
    if waiting := _memory(live):
        found.add(f"{level} live: memory waiting, p50", p50(waiting), "MB")
    found.add(f"{level} live: orchestrator", rss_bytes() / MB, "MB resident")
    found.add(
        f"{level} live: loop lag, p99",
        p99(lag.late_s) * 1e3,
        "ms",
        note=f"p50 {p50(lag.late_s) * 1e3:.2f}",
        **({"at_most": 50.0} if promise else {}),
    )


def _memory(boxes: list[ParkedSandbox]) -> list[float]:
    """MB of anonymous memory of each sandbox; shared pages count once. Empty where no control group is seen."""
    return [used / MB for box in boxes if (used := _anonymous_bytes(box.sandbox)) is not None]


def _anonymous_bytes(sandbox: object) -> int | None:
    clock = sandbox.cpu_clock if isinstance(sandbox, DockerSandbox | OciSandbox) else None
    counter = clock.counter if clock is not None else None
    if counter is None:
        return None
    unified = counter.name == "cpu.stat"
    group = counter.parent if unified else Path(str(counter.parent).replace("/cpuacct/", "/memory/", 1))
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields["anon" if unified else "total_rss"])
    except (OSError, KeyError):
        return None
