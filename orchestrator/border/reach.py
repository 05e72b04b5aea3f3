"""Opens connections to the outside: resolves, judges every address, connects to exactly one of those.

Where the operator has a proxy of their own (HTTP_PROXY and the like), it resolves the names, and only it knows
where they lead: then the names alone are judged here.
"""

import asyncio
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from orchestrator.border.streams import Bytes, Socket, Tls
from orchestrator.errors import EnvironmentUnusable
from orchestrator.network import is_public, proxy_of, trust
from orchestrator.rules.egress import Entry, Place, Refused
from orchestrator.rules.text import printable

_CONNECT_S = 30.0
_LOOKUPS = 8  # of one rollout at a time
_PROXY_HEAD_BYTES = 64 << 10
# A name for which nobody answers holds a thread for as long as the C library asks. Sandboxes choose names, and the
# loop's own threads look up the endpoint and launch sandboxes.
_NAMES = ThreadPoolExecutor(64, "names")
Resolve = Callable[[str, int], Awaitable[list[Any]]]  # as `getaddrinfo`


@dataclass(frozen=True, slots=True)
class There:
    """A connection to a place: a socket, and TLS over it where that is spoken. `proxied`: what a plain request to
    the operator's proxy has besides, and None where it goes to the place itself."""

    layers: tuple[Socket | Tls, ...]
    proxied: tuple[tuple[str, str], ...] | None = None

    @property
    def stream(self) -> Bytes:
        """What is read and written."""
        return self.layers[-1]

    @property
    def is_quiet(self) -> bool:
        """Whether it can be used again: nobody hung up, and nothing waits that was not asked for."""
        return all(layer.is_quiet for layer in self.layers)


async def _resolve(host: str, port: int) -> list[Any]:
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return await asyncio.get_running_loop().run_in_executor(_NAMES, ask)


class Lookups:
    """One rollout's share of the threads that look names up. A name keeps its thread until there is an answer,
    also where nobody waits for one any more."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_LOOKUPS)

    async def of(self, resolve: Resolve, host: str, port: int) -> list[Any]:
        """What `resolve` says, in turn. Raises OSError."""
        await self._free.acquire()
        asked = asyncio.ensure_future(resolve(host, port))
        asked.add_done_callback(self._over)
        return await asyncio.shield(asked)

    def _over(self, asked: asyncio.Future[list[Any]]) -> None:
        self._free.release()
        if not asked.cancelled():
            asked.exception()  # marked as retrieved


class Reach:
    """`resolve`: who knows the addresses of names. `context`: whose certificates are believed; None: those that
    the operator's machine believes."""

    def __init__(self, resolve: Resolve = _resolve, context: ssl.SSLContext | None = None) -> None:
        self._resolve, self._context = resolve, context
        self._is_proxied = bool(getproxies_environment())  # by the operator, at least for some hosts

    async def open(
        self, scheme: str, place: Place, entry: Entry, *, tls: bool, lookups: Lookups | None = None
    ) -> There:
        """`tls`: it is spoken here; False: what is inside is not our business. `lookups`: None: it is for no
        rollout. Raises Refused."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                context = self._context or (await asyncio.to_thread(trust) if tls else None)
                there = await self._raw(scheme, place, entry, lookups or Lookups())
                if not tls:
                    return there
                inside = Tls(there.stream, context or trust(), place.host)
                try:
                    await inside.handshake()
                except BaseException:
                    inside.close()
                    raise
                return There((*there.layers, inside))
        except TimeoutError:
            raise Refused(f"{place} does not answer within {_CONNECT_S:g} s", 504) from None
        except ssl.SSLError as error:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
            raise Refused(f"{place} cannot be believed: {why or 'its TLS is not understood'}", 502) from None
        except (OSError, EnvironmentUnusable) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Refused(f"{place} cannot be reached: {printable(why)[:200]}", 502) from None

    async def _raw(self, scheme: str, place: Place, entry: Entry, lookups: Lookups) -> There:
        if self._is_proxied and (proxy := proxy_of(f"{scheme}://{place}")) is not None:
            return await self._through(proxy, scheme, place)
        addresses = [place.host]
        if not place.is_address:
            found = await lookups.of(self._resolve, place.host, place.port)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if not entry.private and not all(map(is_public, addresses)):
            raise Refused(f'{place} is in a private network: its entry needs "private": true')
        for left, address in enumerate(reversed(addresses)):
            try:
                return There((await Socket.connect(address, place.port),))
            except OSError:
                if left + 1 == len(addresses):
                    raise
        raise OSError("its name has no address")

    async def _through(self, proxy: str, scheme: str, place: Place) -> There:
        """By way of the operator's proxy, whose password stays here. Raises OSError."""
        parts = urlsplit(proxy)
        secure, name = parts.scheme == "https", parts.hostname or ""
        port = parts.port or (443 if secure else 80)
        layers: tuple[Socket | Tls, ...] = (await Socket.connect(name, port),)
        try:
            if secure:
                layers += (inside := Tls(layers[0], await asyncio.to_thread(trust), name),)
                await inside.handshake()
            own: tuple[tuple[str, str], ...] = ()
            if parts.username is not None:
                words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                own = (("Proxy-Authorization", f"Basic {b64encode(words.encode()).decode()}"),)
            if scheme == "http":
                return There(layers, own)
            lines = (f"CONNECT {place} HTTP/1.1", f"Host: {place}", *(f"{name}: {value}" for name, value in own))
            await layers[-1].write("\r\n".join((*lines, "", "")).encode("latin-1"))
            await _opened(layers[-1])
        except BaseException:
            layers[0].close()
            raise
        return There(layers)


async def _opened(stream: Bytes) -> None:
    """The answer of a proxy to CONNECT. Raises OSError."""
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > _PROXY_HEAD_BYTES or not (piece := await stream.read()):
            raise OSError("the proxy's answer has no end")
        head += piece
    head, _, rest = head.partition(b"\r\n\r\n")
    stream.unread(rest)
    status = head.split(b"\r\n", 1)[0].split(b" ", 1)[-1]
    if not status.startswith(b"2"):
        raise OSError(f"the proxy answers {printable(status.decode('latin-1'))[:100]}")
