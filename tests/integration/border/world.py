"""A border between two real sockets: what a sandbox would send, and a server that stands for the outside."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.border.authority import Authority
from orchestrator.border.bodies import Bodies
from orchestrator.border.border import Border
from orchestrator.border.keys import BorderKey
from orchestrator.border.outside import BorderLimits, Outside
from orchestrator.border.reach import Reach
from orchestrator.border.recorded import Cache, Playback
from orchestrator.launch.listeners import serving
from orchestrator.rules.egress import Entry, Rules
from tests.fakes.upstream import Upstream

NAME = "api.example.org"
WAIT_S = 60.0


@dataclass
class Names:
    """A resolver: the addresses of each name, one list for each time that it is asked; the last one stays."""

    addresses: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> list[Any]:
        self.asked.append(host)
        known = self.addresses.get(host, [["127.0.0.1"]])
        found = known.pop(0) if len(known) > 1 else known[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


@dataclass
class Seen:
    """An answer. `body` without its framing."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known.lower() == name), None)


@dataclass
class Box:
    """What a sandbox has: a port of a proxy, and the authority of its run."""

    border: Border
    port: int
    authority: Authority
    upstream: Upstream
    names: Names

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)

    async def raw(self, data: bytes, *, eof: bool = False) -> bytes:
        """All that comes back for these bytes."""
        reader, writer = await self.open()
        writer.write(data)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            try:
                return await reader.read()
            finally:
                writer.close()

    async def tunnel(
        self, place: str | None = None, sni: str | None = NAME, *, alpn: Sequence[str] = ("http/1.1",)
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """TLS behind CONNECT, believing the run's authority alone. Raises OSError."""
        reader, writer = await self.open()
        place = place or f"{NAME}:{self.upstream.tls_port}"
        writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionRefusedError((head + await reader.read()).decode())
            context = ssl.create_default_context(cadata=self.authority.certificate.decode())
            context.set_alpn_protocols(list(alpn))
            if sni is None:
                context.check_hostname = False
            await writer.start_tls(context, server_hostname=sni)
        return reader, writer

    async def inside(self, data: bytes, sni: str = NAME) -> bytes:
        """All that comes back for these bytes inside a tunnel."""
        reader, writer = await self.tunnel(sni=sni)
        writer.write(data)
        async with asyncio.timeout(WAIT_S):
            try:
                return await reader.read()
            finally:
                writer.close()

    async def get(self, path: str = "/", *headers: str, method: str = "GET", body: bytes | None = None) -> Seen:
        """By https, with a connection of its own."""
        more = [] if body is None else [f"Content-Length: {len(body)}"]
        place = f"{NAME}:{self.upstream.tls_port}"
        lines = (f"{method} {path} HTTP/1.1", f"Host: {place}", "Connection: close", *headers, *more, "", "")
        return seen(await self.inside("\r\n".join(lines).encode() + (body or b"")), method)

    async def plain(self, path: str = "/", *headers: str, host: str = NAME, method: str = "GET") -> Seen:
        """By http, with a connection of its own."""
        place = f"{host}:{self.upstream.port}"
        lines = (
            f"{method} http://{place}{path} HTTP/1.1",
            f"Host: {place}",
            "Connection: close",
            *headers,
            "",
            "",
        )
        return seen(await self.raw("\r\n".join(lines).encode()), method)


def seen(data: bytes, method: str = "GET") -> Seen:
    """The one answer in these bytes."""
    import h11

    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    if data:
        connection.receive_data(b"")
    response, body = None, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
        if isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
    assert response is not None, data
    headers = [(name.decode(), value.decode("latin-1")) for name, value in response.headers.raw_items()]
    return Seen(response.status_code, headers, body)


@asynccontextmanager
async def box(
    upstream: Upstream,
    *entries: Entry,
    names: Names | None = None,
    keys: tuple[BorderKey, ...] = (),
    bodies: Bodies | None = None,
    cache: Cache | None = None,
    limits: BorderLimits | None = None,
    playback: Playback | None = None,
    network: bool = True,
    terminates: bool = True,
) -> AsyncIterator[Box]:
    """Without entries: everything of the server, whose addresses may be private."""
    ports = (upstream.port, upstream.tls_port)
    rules = Rules(entries or (Entry(NAME, ports, private=True),))
    names, authority = names or Names(), Authority()
    outside = Outside(
        Reach(names.resolve, upstream.trust),
        authority.context if terminates else None,
        bodies or Bodies(None),
        keys,
        cache,
        network,
    )
    border = Border(rules, outside, limits, playback=playback)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    async with serving(listener, border):
        yield Box(border, port, authority, upstream, names)
