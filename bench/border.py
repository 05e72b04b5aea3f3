"""What a program in a sandbox asks of the outside, beside the same asked directly: plain, and TLS that ends here.

The server, the programs that ask it, and the runners' side of streams are processes of their own, as in
`bench.world`; between them is the border of a run: it judges, counts, hashes and keeps what passes.

    python -m bench.border serve     prints its ports, plain and TLS, and what to trust
"""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench.numbers import difference_of_pairs, p50, p99
from bench.report import Findings, Scale
from bench.world import BOXES, EACH, asked, box, looking_at_lag, serving
from orchestrator.border.authority import Authority
from orchestrator.border.bodies import Bodies
from orchestrator.border.border import Border
from orchestrator.border.outside import BorderLimits, Outside
from orchestrator.border.reach import Reach
from orchestrator.rules.egress import Entry, Rules

TITLE = "requests to the outside"
HOST = "127.0.0.1"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
_PIECE = bytes(1 << 20)
_PLENTY = BorderLimits(requests=10**9, size=1 << 60)


async def measure(scale: Scale) -> Findings:
    found = Findings()
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(serving("bench.border", "serve"))
        port, tls_port, trusted = told["port"], told["tls_port"], told["authority"]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        (of_server := folder / "server.pem").write_text(trusted)
        authority = Authority()
        (of_run := folder / "run.pem").write_bytes(authority.certificate)
        outside = Outside(
            Reach(context=ssl.create_default_context(cadata=trusted)),
            authority.context,
            await asyncio.to_thread(Bodies, folder / "egress", 1 << 30),
        )
        rules = Rules((Entry(HOST, ports=(port, tls_port), private=True),))
        ways = [Border(rules, outside, _PLENTY) for _ in range(BOXES)]
        proxies = [(await box(stack, way)).addresses[0][1] for way in ways]

        bare, through = await asked("bench.requests", "pairs", scale.pick(20, 300, 1000), port, proxies[0])
        found.samples |= {"bare_s": bare, "through_s": through}
        found.add("a request, bare, p50", p50(bare) * 1e3, "ms")
        added = difference_of_pairs(through, bare) * 1e3
        found.add("through the border, added", added, "ms", at_most=3.0, note="median of pairs")
        await _downloads(
            found,
            scale,
            {
                "plain": {"bare": (port, 0, "-"), "the border": (port, proxies[0], "-")},
                "TLS": {"bare": (tls_port, 0, of_server), "the border": (tls_port, proxies[0], of_run)},
            },
        )
        for what, name in (("load", "each on a connection of its own"), ("kept", "on connections that stay")):
            await _many(found, scale, what, f"{name}, bare", [(port, 0)] * BOXES)
            await _many(found, scale, what, f"{name}, {BOXES} sandboxes", [(port, proxy) for proxy in proxies])
    return found


async def _downloads(found: Findings, scale: Scale, kinds: dict[str, dict[str, tuple[object, ...]]]) -> None:
    size = scale.pick(8, 256, 1024)
    for kind, ways in kinds.items():
        lags = found.samples.setdefault(f"download_lag_s, {kind}", [])
        for _ in range(scale.pick(1, 3, 5)):
            for name, words in ways.items():
                async with looking_at_lag(lags if name != "bare" else []):
                    took_s = await asked("bench.requests", "download", size, *words)
                found.samples.setdefault(f"download_mb_per_s, {kind}, {name}", []).append(size * 1.048576 / took_s)
        for name in ways:
            least = {"at_least": 200.0} if name != "bare" and kind == "plain" else {}
            found.add(
                f"one download, {kind}, {name}",
                p50(found.samples[f"download_mb_per_s, {kind}, {name}"]),
                "MB/s",
                **least,
            )
        found.add("loop lag meanwhile, p99", p99(lags) * 1e3, "ms", at_most=10.0)


async def _many(found: Findings, scale: Scale, what: str, name: str, places: list[tuple[int, int]]) -> None:
    count, lags = scale.pick(40, 1000, 5000), found.samples.setdefault(f"lag_s, {what}, {name}", [])
    async with looking_at_lag(lags):
        took_s = await asyncio.gather(*(asked("bench.requests", what, count, EACH, *place) for place in places))
    rate = sum(count / one for one in took_s)
    if not places[0][1]:
        found.add(f"requests {name}", rate, "/s")
        return
    found.add(f"requests {name}", rate, "/s", at_least=2000.0)
    found.add("loop lag meanwhile, p99", p99(lags) * 1e3, "ms", at_most=10.0)


# ---------------------------------------------------------------- programs


async def serve() -> None:
    """Until it is killed. `/ask` has 100 bytes, `/send/N` N MiB."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split(b" ", 2)[1]
            if not path.startswith(b"/send/"):
                writer.write(_ANSWER)
                continue
            size = int(path.rpartition(b"/")[2])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size << 20))
            for _ in range(size):
                writer.write(_PIECE)
                await writer.drain()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    authority = Authority()
    plain = await asyncio.start_server(quietly, HOST, 0, backlog=1024)
    secure = await asyncio.start_server(quietly, HOST, 0, ssl=authority.context(HOST))
    ports = [server.sockets[0].getsockname()[1] for server in (plain, secure)]
    told = {"port": ports[0], "tls_port": ports[1], "authority": authority.certificate.decode()}
    print(json.dumps(told), flush=True)
    await asyncio.gather(plain.serve_forever(), secure.serve_forever())


if __name__ == "__main__":
    asyncio.run(serve())
