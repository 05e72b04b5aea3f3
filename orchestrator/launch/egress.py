"""The one way out of a sandbox that may fetch something: an HTTP proxy that knows a list of hosts.

The sandbox is sealed as all others are. In its network namespace there is `lo` alone, and there this proxy
listens; what it asks for is asked by this process, through the operator's own proxy if there is one. Programs find
it by the variables that curl, apt, pip, uv and the like read. Of plain HTTP it takes GET and HEAD, one to a
connection, so that no second request gets anywhere else; all else goes through tunnels (CONNECT).
"""

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from socket import SOCK_STREAM, socket
from urllib.parse import unquote, urlsplit

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.names import HOST
from orchestrator.network import is_public, proxy_of, trust
from orchestrator.rules.text import printable

ANY = "*"  # every public host
_USUAL_PORTS = (80, 443)
_PORT = 61_080  # above those that programs get without asking for one
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")  # of the sandbox itself
_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_HOP = ("connection", "keep-alive", "host")  # headers that are not handed on; nor are those of proxies
_HEAD_BYTES, _PIECE_BYTES = 64 << 10, 64 << 10
_HEAD_S = _CONNECT_S = 30.0
_LINGER_S = 5.0
_CONNECTIONS = 128
_NAMES = 50  # that are remembered


class _Refused(Exception):
    """What the client is told. `status`: with its reason."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Request:
    """`address`: as a URL has it, with a port. `headers`: those that are handed on; empty for a tunnel."""

    method: str
    host: str
    port: int
    path: str = ""
    headers: tuple[str, ...] = ()

    @property
    def is_tunnel(self) -> bool:
        return self.method == "CONNECT"

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Egress:
    """`allowed`: NAME, NAME:PORT or `*`; without a port, 80 and 443. What is named may be anywhere, in this
    machine's network too; `*` is for public addresses. `reached`, `refused`: what was asked for so far."""

    port = _PORT

    def __init__(self, allowed: Sequence[str]) -> None:
        self.allowed = tuple(allowed)
        self._named = frozenset(_entry(text) for text in allowed if text != ANY)
        self._reached, self._refused = dict[str, None](), dict[str, None]()
        self._open = set[asyncio.Task[None]]()

    @property
    def reached(self) -> tuple[str, ...]:
        return tuple(self._reached)

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(self._refused)

    @property
    def environment(self) -> Mapping[str, str]:
        """By which programs in the sandbox find it."""
        names = {name for name, _ in self._named}
        inside = ",".join(name for name in _OWN_NAMES if name not in names)
        return dict.fromkeys(_VARIABLES, f"http://127.0.0.1:{_PORT}") | dict.fromkeys(
            ("no_proxy", "NO_PROXY"), inside
        )

    @asynccontextmanager
    async def serving(self, listener: socket) -> AsyncIterator[None]:
        """Answers what comes to the socket, which it closes. On any exit, all connections are closed."""
        server = await asyncio.start_server(self._begin, sock=listener, limit=_HEAD_BYTES)
        try:
            yield
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    # ------------------------------------------------------------ one connection

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer), name="egress")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                if len(self._open) > _CONNECTIONS:
                    raise _Refused("503 Service Unavailable", "too many connections at a time")
                request = await _request(reader)
                there = await self._connected(request)
            except _Refused as refused:
                body = f"{refused}\n".encode()
                writer.write(f"HTTP/1.1 {refused.status}\r\nContent-Length: {len(body)}\r\n".encode())
                writer.write(b"Content-Type: text/plain\r\nConnection: close\r\n\r\n" + body)
                await _finish(reader, writer)
                return
            try:
                if request.is_tunnel:
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
                else:
                    await _pump(there[0], writer)
                    await _finish(reader, writer)
            finally:
                there[1].close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the other end is gone, which is for the program there to notice
        finally:
            writer.close()

    async def _connected(self, request: _Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To where the request leads; a plain one has been handed on. Raises _Refused."""
        is_usual = request.port in _USUAL_PORTS
        is_named = (request.host, request.port) in self._named
        is_named |= is_usual and (request.host, None) in self._named
        if not is_named and not (ANY in self.allowed and is_usual and is_public(request.host)):
            _note(self._refused, request)
            raise _Refused("403 Forbidden", f"{request.address} is not in env.grader_network")
        try:
            async with asyncio.timeout(_CONNECT_S):
                scheme = "https" if request.is_tunnel else "http"
                if (proxy := proxy_of(f"{scheme}://{request.address}")) is not None:
                    there = await _through(proxy, request)
                else:
                    there = await self._direct(request, anywhere=is_named)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, EnvironmentUnusable) as error:
            why = str(error) or type(error).__name__
            raise _Refused("502 Bad Gateway", f"{request.address} cannot be reached: {why}") from None
        _note(self._reached, request)
        return there

    async def _direct(
        self, request: _Request, *, anywhere: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises _Refused, OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(request.host, request.port, type=SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if not anywhere and not all(map(is_public, addresses)):
            _note(self._refused, request)
            raise _Refused("403 Forbidden", f"{request.address} is in a private network: name it to allow it")
        for left, address in enumerate(reversed(addresses)):
            try:
                there = await asyncio.open_connection(address, request.port)
                break
            except OSError:
                if left + 1 == len(addresses):
                    raise
        if not request.is_tunnel:
            there[1].write(_head(request, request.path))
        return there


async def _through(proxy: str, request: _Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """By way of the operator's proxy, whose password stays here. Raises OSError."""
    parts = urlsplit(proxy)
    secure = parts.scheme == "https"
    there = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=trust() if secure else None
    )
    own: tuple[str, ...] = ()
    if parts.username is not None:
        words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        own = (f"Proxy-Authorization: Basic {b64encode(words.encode()).decode()}",)
    if not request.is_tunnel:
        there[1].write(_head(request, f"http://{request.address}{request.path}", own))
        return there
    there[1].write(_head(request, request.address, own))
    status = (await there[0].readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split(b" ", 1)[-1]
    if not status.startswith(b"2"):
        there[1].close()
        raise OSError(f"the proxy answers {printable(status.decode('latin-1'))[:100]}")
    return there


def _head(request: _Request, target: str, more: tuple[str, ...] = ()) -> bytes:
    close = () if request.is_tunnel else ("Connection: close",)
    lines = (f"{request.method} {target} HTTP/1.1", f"Host: {request.address}", *request.headers, *more, *close)
    return "\r\n".join((*lines, "", "")).encode("latin-1")


async def _request(reader: asyncio.StreamReader) -> _Request:
    """Raises _Refused; OSError and the like if there comes none."""
    try:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        line, *headers = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = line.split(" ")
        if method == "CONNECT":
            return _Request(method, *_place(target, None))
        if method not in ("GET", "HEAD"):
            raise _Refused("405 Method Not Allowed", f"{printable(method)[:20]} takes https here")
        parts = urlsplit(target)
        if parts.scheme.lower() != "http" or "@" in parts.netloc:
            raise ValueError(target)
    except (ValueError, asyncio.LimitOverrunError):
        raise _Refused("400 Bad Request", "this is a proxy: give a whole address") from None
    path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    names = [(header.partition(":")[0].strip().lower(), header) for header in headers]
    kept = tuple(header for name, header in names if name not in _HOP and not name.startswith("proxy-"))
    return _Request(method, *_place(parts.netloc, 80), path, kept)


def _entry(text: str) -> tuple[str, int | None]:
    name, port = text, None
    if match := re.fullmatch(r"(\[.*\]|[^:]*):([0-9]+)", text):
        name, port = match[1], int(match[2])
    return name.strip("[]").lower().rstrip("."), port


def _place(text: str, usual: int | None) -> tuple[str, int]:
    """(host, port). Raises ValueError."""
    if text == ANY or not HOST.fullmatch(text):
        raise ValueError(text)
    host, port = _entry(text)
    port = usual if port is None else port
    if port is None or not 0 < port < 1 << 16:
        raise ValueError(text)
    if ":" in host:
        host = str(ip_address(host))
    return host, port


def _note(names: dict[str, None], request: _Request) -> None:
    if len(names) < _NAMES:
        names[request.host if request.port in _USUAL_PORTS else request.address] = None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until its end, which is handed on."""
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits until the client has read all: what it has sent beyond its request would else cut the answer off."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(_PIECE_BYTES):
                pass
