"""The proxy at the end of a sandbox's relay: decides what leaves, puts keys in, records, plays again.

A program in the sandbox asks it for http:// in the plain way of proxies, and opens tunnels by CONNECT for all
else. TLS in a tunnel ends here, under a certificate of the run's own authority, and the requests inside are judged
one by one; or, where the entry says `tunnel`, it passes as it is once its first words have named the allowed host.

What is refused is an answer that says what to do, and an entry on record. It ends nothing.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial

from orchestrator.border.client_hello import read_hello
from orchestrator.border.exchange import Exchange
from orchestrator.border.journal import Journal
from orchestrator.border.messages import Asked, linger, read_request
from orchestrator.border.outside import BorderLimits, Connection, Outside, Terms
from orchestrator.border.reach import There
from orchestrator.border.recorded import Playback
from orchestrator.border.streams import Bytes, Plain, Tls
from orchestrator.rules.egress import Entry, Place, Refused, Rules, absolute, normal_host, origin, place_of
from orchestrator.types import Crossing, Listener

_UNRECOGNIZED_NAME = bytes((21, 3, 3, 0, 2, 2, 112))  # a fatal alert of TLS


class Border:
    """The proxy of one rollout."""

    listener = Listener(is_proxy=True)

    def __init__(
        self,
        rules: Rules,
        outside: Outside,
        limits: BorderLimits | None = None,
        *,
        playback: Playback | None = None,
        added: Callable[[Crossing], None] | None = None,
    ) -> None:
        """`playback`: what is answered from a record first. `added`: is told of each entry on record."""
        limits = limits or BorderLimits()
        self.journal = Journal(limits.requests, limits.size, added)
        self._terms = Terms(rules, outside, limits, self.journal, playback)
        self._streams = 0

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """What was asked so far, in the order in which it was asked."""
        return self.journal.crossings

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, to its end. Raises OSError: it broke off, and the other side must see that."""
        stream = Plain(reader, writer)
        self._streams += 1
        try:
            if self._streams > self._terms.limits.streams:
                why = f"more than {self._terms.limits.streams} connections at a time: close some"
                await self._turn_away(stream, Refused(why, 429))
                return
            await self._plain(stream)
        finally:
            self._streams -= 1
            stream.close()

    async def _plain(self, stream: Bytes) -> None:
        there = Connection(self._terms)
        try:
            while (asked := await self._next(stream)) is not None:
                if asked.method == "CONNECT":
                    await self._connect(stream, asked)
                    return
                exchange = Exchange(self._terms, asked, "http", there)
                if not await exchange.run(partial(_of_proxy, asked)):
                    await linger(stream)
                    return
        finally:
            there.close()

    async def _next(self, stream: Bytes) -> Asked | None:
        """The next request. What cannot be read is answered, and ends the stream."""
        try:
            return await read_request(stream)
        except Refused as refused:
            if refused.status != 408:
                await self._turn_away(stream, refused)
            return None

    async def _turn_away(self, stream: Bytes, refused: Refused, place: Place | None = None) -> None:
        """An answer to what could not be read, which ends the stream."""
        crossing = self.journal.begin("", "http" if place is None else "https", place)
        self.journal.end(crossing, status=refused.status, refusal=str(refused))
        body = f"{refused}\n".encode()
        head = f"HTTP/1.1 {refused.status} Refused\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        await stream.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await linger(stream)

    # ------------------------------------------------------------ tunnels

    async def _connect(self, stream: Bytes, asked: Asked) -> None:
        crossing, outside = self.journal.begin("CONNECT", "https", None), self._terms.outside
        try:
            self.journal.demand_room()
            if asked.has_body:
                raise Refused("CONNECT has no body", 400)
            place = place_of(asked.target, None)
            crossing = replace(crossing, host=place.host, port=place.port)
            _demand_host(asked, place, "https")
            entry = self._entry(place, crossing.url)
        except Refused as refused:
            self.journal.end(crossing, status=refused.status, refusal=str(refused))
            await asked.refuse(refused)
            await linger(stream)
            return
        await stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if entry is not None and (entry.tls == "tunnel" or outside.contexts is None):
            await self._tunnel(stream, place, entry, crossing)
        elif (inside := await self._ended(stream, place, crossing)) is not None:
            await self._inside(inside, place)

    def _entry(self, place: Place, url: str) -> Entry | None:
        """By which a tunnel may be opened. None: there is only the record. Raises Refused."""
        terms = self._terms
        if terms.outside.network:
            return terms.rules.at(place)[0]
        if terms.playback is not None and (then := terms.playback.refusal("CONNECT", url)) is not None:
            raise then
        if terms.playback is not None and (place.host, place.port) in terms.playback.tunnels:
            raise Refused(
                f"{place} was reached by a tunnel, whose inside is not on record: it cannot be played again"
            )
        return None

    async def _ended(self, stream: Bytes, place: Place, crossing: Crossing) -> Tls | None:
        """TLS that ends here. None: it does not come about, which is told and on record."""
        contexts, wait_s = self._terms.outside.contexts, self._terms.limits.request_s
        assert contexts is not None
        try:
            async with asyncio.timeout(wait_s):
                hello, says = await read_hello(stream)
                _demand_name(says.name, place, must=False)
                stream.unread(hello)
                inside = Tls(stream, contexts(place.host))
                await inside.handshake()
            return inside
        except Refused as refused:
            await stream.write(_UNRECOGNIZED_NAME)
            why = str(refused)
        except ssl.SSLError as error:
            why = f"TLS does not come about ({error.reason}): the program must trust the run's own authority"
        except TimeoutError:
            why = "the words of TLS do not come"
        except OSError:
            why = "it hung up before TLS came about"
        self.journal.end(crossing, refusal=why)
        await linger(stream)
        return None

    async def _inside(self, stream: Bytes, place: Place) -> None:
        """Requests in a tunnel whose TLS ends here."""
        there, is_counted = Connection(self._terms), True
        try:
            while True:
                try:
                    asked = await read_request(stream)
                except Refused as refused:
                    if refused.status != 408:
                        await self._turn_away(stream, refused, place)
                    return
                except ssl.SSLError:
                    return
                if asked is None:
                    return
                if is_counted:  # its requests are, from here on
                    self.journal.forget()
                    is_counted = False
                exchange = Exchange(self._terms, asked, "https", there)
                if not await exchange.run(partial(_of_tunnel, asked, place)):
                    await linger(stream)
                    return
        finally:
            there.close()

    async def _tunnel(self, stream: Bytes, place: Place, entry: Entry, crossing: Crossing) -> None:
        """TLS that is not ours: it passes once it has named the place."""
        there: There | None = None
        sizes, refusal = [0, 0], "the sandbox ended it"
        try:
            async with asyncio.timeout(self._terms.limits.request_s):
                hello, says = await read_hello(stream)
                _demand_name(says.name, place, must=not place.is_address)
                if says.hidden:
                    raise Refused(f"the words of TLS hide a second name (ECH), which may be another than {place}")
                there = await self._terms.open("https", place, entry, tls=False)
                stream.unread(hello)
                await _both(self._pump(stream, there.stream, sizes, 0), self._pump(there.stream, stream, sizes, 1))
                refusal = ""
        except Refused as refused:
            refusal = str(refused)
            if there is None:
                await stream.write(_UNRECOGNIZED_NAME)
                await linger(stream)
        except TimeoutError:
            refusal = f"it took longer than {self._terms.limits.request_s:g} s"
        except OSError as error:
            refusal = f"it broke off: {type(error).__name__}"
        finally:
            facts = {"status": 200, "source": "network"} if there is not None else {}
            if there is not None:
                there.stream.close()
            crossing = replace(crossing, scheme="tunnel")
            self.journal.end(crossing, refusal=refusal, sent=sizes[0], received=sizes[1], **facts)

    async def _pump(self, source: Bytes, sink: Bytes, sizes: list[int], side: int) -> None:
        """All that comes, until its end, which is handed on."""
        while piece := await source.read():
            self.journal.count(len(piece))
            sizes[side] += len(piece)
            await sink.write(piece)
        with suppress(OSError):
            await sink.end()


def _of_proxy(asked: Asked) -> tuple[Place, str]:
    place, target = absolute(asked.target)
    _demand_host(asked, place, "http")
    return place, target


def _of_tunnel(asked: Asked, place: Place) -> tuple[Place, str]:
    _demand_host(asked, place, "https")
    return place, origin(asked.method, asked.target)


def _demand_host(asked: Asked, place: Place, scheme: str) -> None:
    """Raises Refused."""
    if not all(_is(place, value, scheme) for value in asked.values("host")):
        raise Refused(f"the Host header names another place than {place}")


def _is(place: Place, authority: str, scheme: str) -> bool:
    try:
        return place_of(authority, scheme) == place
    except Refused:
        return False


def _demand_name(name: str | None, place: Place, *, must: bool) -> None:
    """Raises Refused."""
    if name is None:
        if must:
            raise Refused(f"the words of TLS name no server (SNI): {place.host} must be named")
        return
    try:
        same = normal_host(name) == place.host
    except ValueError:
        same = False
    if not same:
        raise Refused(f"the words of TLS name another server (SNI) than {place}")


async def _both(*pumps: Coroutine[None, None, None]) -> None:
    """Raises what the first of them raises; the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for pump in pumps:
                group.create_task(pump)
    except* (OSError, Refused) as errors:
        raise errors.exceptions[0] from None
