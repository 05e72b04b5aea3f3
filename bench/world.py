"""What goes through the channel of a sandbox beside the same without it: a request, a download, many requests.

The server, the programs that ask it, and the runners' side of streams are processes of their own; nothing is in a
container, so that only the way is measured. "A plain relay" is what asyncio alone can do: a process that copies
between two connections. Its figures show what the machine gave meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench.numbers import difference_of_pairs, p50, p99
from bench.report import Findings, Scale
from orchestrator.proxy.lease import Lease
from orchestrator.types import Listener
from tests.fakes.relayed import Relayed, relayed

TITLE = "streams through the channel"
LOOK_S = 0.002
BOXES, EACH = 4, 4  # connections of each
_PIECE_BYTES = 256 << 10


class Forward:
    """A way to a port of this machine."""

    listener = Listener()

    def __init__(self, port: int) -> None:
        self._port = port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways, to the end of both."""
        there = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
        finally:
            there[1].close()


class Answers:
    """A way that answers by itself, as a recorded answer or a refusal is answered."""

    listener = Listener()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the program hangs up."""
        while await reader.readline():
            writer.write(b"x" * 100)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


async def measure(scale: Scale) -> Findings:
    found = Findings()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving("bench.streams", "serve"))
        plain = await stack.enter_async_context(serving("bench.world", "plain", server))
        boxes = [await box(stack, Forward(server)) for _ in range(BOXES)]
        ports = [box.addresses[0][1] for box in boxes]
        alone = [(await box(stack, Answers())).addresses[0][1] for _ in range(BOXES)]
        bare, through, copied = await asked(
            "bench.streams", "pairs", scale.pick(20, 500, 2000), server, ports[0], plain
        )
        found.samples |= {"bare_s": bare, "through_s": through, "copied_s": copied}
        found.add("a request, bare, p50", p50(bare) * 1e3, "ms")
        found.add("through a plain relay, added", difference_of_pairs(copied, bare) * 1e3, "ms", note="pairs")
        added = difference_of_pairs(through, bare) * 1e3
        found.add("through the channel, added", added, "ms", at_most=3.0, note="median of pairs")
        async with looking_at_lag(found.samples.setdefault("idle_lag_s", [])):
            await asked(
                "bench.streams", "download", scale.pick(8, 256, 1024), server
            )  # which is not of this process
        lag_ms = p99(found.samples["idle_lag_s"]) * 1e3
        found.add("loop lag while others download, p99", lag_ms, "ms", note="what the machine gives")
        await _downloads(found, scale, {"bare": server, "a plain relay": plain, "the channel": ports[0]})
        for what, name, targets in (
            ("load", "each on a connection of its own", ports),
            ("kept", "on connections that stay", ports),
            ("load", "each on its own, answered by the way", alone),
            ("kept", "that stay, answered by the way", alone),
        ):
            await _many(found, scale, what, name, targets)
    return found


async def box(stack: AsyncExitStack, way: Any) -> Relayed:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
    box: tuple[Relayed, Lease] = await stack.enter_async_context(relayed(folder, [way], stream_bytes=1 << 50))
    return box[0]


async def _downloads(found: Findings, scale: Scale, ports: dict[str, int]) -> None:
    size, lags = scale.pick(8, 256, 1024), found.samples.setdefault("download_lag_s", [])
    for _ in range(scale.pick(1, 3, 5)):
        for name, port in ports.items():
            async with looking_at_lag(lags if name == "the channel" else []):
                took_s = await asked("bench.streams", "download", size, port)
            found.samples.setdefault(f"download_mb_per_s, {name}", []).append(size * 1.048576 / took_s)
    for name in ports:
        least = {"at_least": 200.0} if name == "the channel" else {}
        found.add(f"one download, {name}", p50(found.samples[f"download_mb_per_s, {name}"]), "MB/s", **least)
    found.add("loop lag meanwhile, p99", p99(lags) * 1e3, "ms", at_most=10.0)


async def _many(found: Findings, scale: Scale, what: str, name: str, ports: list[int]) -> None:
    count, lags = scale.pick(40, 1000, 5000), found.samples.setdefault(f"lag_s, {name}", [])
    async with looking_at_lag(lags):
        took_s = await asyncio.gather(*(asked("bench.streams", what, count, EACH, port) for port in ports))
    rate = sum(count / one for one in took_s)
    found.add(f"requests {name}, {len(ports)} sandboxes", rate, "/s", at_least=2000.0)
    found.add("loop lag meanwhile, p99", p99(lags) * 1e3, "ms", at_most=10.0)


@asynccontextmanager
async def looking_at_lag(lags: list[float]) -> AsyncIterator[None]:
    """How late the loop is, again and again, while the block runs."""

    async def look() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LOOK_S)
            lags.append(max(0.0, time.perf_counter() - before - LOOK_S))

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def asked(program: str, *words: object) -> Any:
    """What the program says. Raises RuntimeError."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", program, *map(str, words), stdout=pipe)
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{program} {words} ended with {process.returncode}")
    return json.loads(said)


@asynccontextmanager
async def serving(module: str, *words: object) -> AsyncIterator[Any]:
    """The line of JSON that the program prints; it is killed when the block is left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *map(str, words), stdout=pipe)
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


async def _plain_relay(port: int) -> None:
    way = Forward(port)
    server = await asyncio.start_server(way.carry, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_plain_relay(int(sys.argv[2])))
