"""A server on this machine's loopback, plain and with TLS, under an authority of its own: what it answers to a
request is given as bytes, so that it can be anything. It notes what it was sent, byte by byte."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import h11

from orchestrator.border.authority import Authority


@dataclass
class Got:
    """One request as the server understood it. `head`: its bytes."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes
    secure: bool

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known.lower() == name), None)


Answering = Callable[[Got], bytes | Awaitable[bytes]]


@dataclass
class Upstream:
    """`port`, `tls_port`: where it listens. `got`: the requests. `connections`: how many were made."""

    answering: Answering
    authority: Authority
    port: int = 0
    tls_port: int = 0
    got: list[Got] = field(default_factory=list)
    connections: int = 0

    @property
    def trust(self) -> ssl.SSLContext:
        """For a client that believes its certificates."""
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        context.set_alpn_protocols(["http/1.1"])
        return context

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        secure = writer.get_extra_info("ssl_object") is not None
        with suppress(OSError, asyncio.IncompleteReadError, h11.RemoteProtocolError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                connection = h11.Connection(h11.SERVER)
                connection.receive_data(head)
                event = connection.next_event()
                assert isinstance(event, h11.Request), event
                body = b""
                while not isinstance(piece := connection.next_event(), h11.EndOfMessage):
                    if isinstance(piece, h11.Data):
                        body += piece.data
                    elif piece is h11.NEED_DATA:
                        connection.receive_data(await reader.read(65536))
                headers = [(name.decode(), value.decode()) for name, value in event.headers.raw_items()]
                got = Got(event.method.decode(), event.target.decode(), headers, body, head, secure)
                self.got.append(got)
                answer = self.answering(got)
                if not isinstance(answer, bytes):
                    answer = await answer
                writer.write(answer)
                await writer.drain()
                heads = (head, answer.partition(b"\r\n\r\n")[0])
                if any(b"connection: close" in one.lower() for one in heads):
                    break
        writer.close()


@asynccontextmanager
async def upstream(answering: Answering, host: str = "api.example.org") -> AsyncIterator[Upstream]:
    """`host`: the name that its certificate is for."""
    made = Upstream(answering, Authority())
    tasks = set[asyncio.Task[None]]()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(made.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    plain = await asyncio.start_server(begin, "127.0.0.1", 0, backlog=1024)
    secure = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=made.authority.context(host), backlog=1024)
    made.port, made.tls_port = (server.sockets[0].getsockname()[1] for server in (plain, secure))
    try:
        yield made
    finally:
        for server in (plain, secure):
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes = b"hello", status: str = "200 OK", *headers: str) -> bytes:
    """An answer with its length."""
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body
