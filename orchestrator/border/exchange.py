"""One request of a sandbox: judged, answered from a record, from the cache or by the outside, put on record."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from hashlib import sha256

from orchestrator.border.bodies import NOTHING
from orchestrator.border.http1 import Headers, by_name, length_of, words
from orchestrator.border.journal import bounded
from orchestrator.border.keys import BorderKey, Redaction, keys_for
from orchestrator.border.messages import Answer, Asked, Sending, framing, handed_on
from orchestrator.border.outside import Connection, Terms
from orchestrator.border.recorded import Stored
from orchestrator.rules.egress import Entry, Place, Refused
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Crossing

_SEARCHED_BYTES = 64 << 10  # for a key, at a time: others have their turn in between
_COMPARED_BYTES = 1 << 20  # of a request's body, with a record, where the request may still leave
_COOKIE = re.compile(r"(?i)^([^=;\s]*=)([^;]*)")
_MAY_BE_TWICE = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE"))  # by RFC 9110, 9.2.2
# What an answer with a key in it would be cut, packed or left out by.
_NOT_WITH_KEYS = frozenset(("range", "if-range", "accept-encoding"))


class Exchange:
    """`connection`: of the stream it came by."""

    def __init__(self, terms: Terms, asked: Asked, scheme: str, connection: Connection) -> None:
        self._terms, self._asked, self._scheme, self._connection = terms, asked, scheme, connection
        self._sent, self._received = terms.outside.bodies.body(), terms.outside.bodies.body()
        self._sent_whole = self._is_fresh = False
        self._facts: dict[str, object] = {}
        self._failure: BaseException | None = None

    async def run(self, read: Callable[[], tuple[Place, str]]) -> bool:
        """Whether another request may follow on its stream. `read`: (where it leads, path and query), or raises
        Refused. Raises OSError: the answer broke off."""
        asked, terms = self._asked, self._terms
        place: Place | None = None
        target, refusal, whole = "", "", False
        try:
            place, target = read()
        except Refused as refused:
            unread = refused
        crossing = terms.journal.begin(asked.method, self._scheme, place, target)
        try:
            async with asyncio.timeout(terms.limits.request_s):
                terms.journal.demand_room()
                if place is None:
                    raise unread
                terms.journal.count(asked.size)
                await self._answer(crossing, place, target)
                whole = True
        except Refused as refused:
            refusal = str(refused)
            await self._tell(refused)
        except TimeoutError:
            refusal = f"it took longer than {terms.limits.request_s:g} s"
            await self._tell(Refused(f"{place or 'this'}: {refusal}", 504))
        except OSError as error:
            refusal = f"it broke off: {str(error) or type(error).__name__}"
            raise
        except asyncio.CancelledError:
            refusal = "the sandbox ended it"
            raise
        finally:
            sent = self._sent.known() if whole and self._sent_whole else None
            if sent and (received := self._received.known()):
                self._end(crossing, sent_sha256=sent, received_sha256=received, kept=True)
            else:
                await uninterrupted(self._record(crossing, refusal, whole))
        return asked.reusable

    async def _tell(self, refused: Refused) -> None:
        """Raises OSError: an answer has begun that cannot be ended."""
        self._connection.close()
        if self._asked.begun:
            raise ConnectionResetError(str(refused))
        self._facts |= {"status": refused.status, "source": "border"}
        try:
            await self._asked.refuse(refused)
        except Refused as error:
            raise ConnectionResetError(str(error)) from None

    async def _record(self, crossing: Crossing, refusal: str, whole: bool) -> None:
        facts: dict[str, object] = {"refusal": refusal}
        if whole:
            sent = await self._sent.whole() if self._sent_whole else (None, False)
            received = await self._received.whole()
            facts |= {"sent_sha256": sent[0], "received_sha256": received[0], "kept": sent[1] and received[1]}
        await self._sent.drop()
        await self._received.drop()
        self._end(crossing, **facts)

    def _end(self, crossing: Crossing, **facts: object) -> None:
        sizes = {"sent": self._sent.size, "received": self._received.size}
        ended = self._terms.journal.end(crossing, **facts, **sizes, **self._facts)
        if (cache := self._terms.outside.cache) is not None and self._is_fresh:
            cache.add(ended, self._asked.headers)

    # ------------------------------------------------------------ who answers

    async def _answer(self, crossing: Crossing, place: Place, target: str) -> None:
        """Raises Refused, OSError."""
        asked, outside, playback = self._asked, self._terms.outside, self._terms.playback
        _demand_plain(asked)
        entry = None
        if outside.network:
            entry = self._terms.rules.judge(place, asked.method, target)
            if entry.tls == "tunnel" and self._scheme == "https":
                raise Refused(f"{place} is reached by a tunnel alone")
        pieces = self._body() if asked.has_body else None
        self._sent_whole = pieces is None
        if playback is not None and (not outside.network or playback.knows(asked.method, crossing.url)):
            digest, pieces = await self._compared(pieces)
            stored = (
                playback.take(asked.method, crossing.url, digest) if digest is not None else "its body is too long"
            )
            if isinstance(stored, Stored):
                await self._serve(stored)
                return
            if not outside.network:
                if (then := playback.refusal(asked.method, crossing.url)) is not None:
                    raise then
                playback.missed += 1
                raise Refused(f"not on record: {stored}", 504)
        cache = outside.cache if pieces is None else None
        if (
            cache is not None
            and (found := cache.find(asked.method, crossing.url, target, asked.headers)) is not None
        ):
            await self._serve(found)
            cache.saved += self._received.size
            return
        assert entry is not None
        await self._ask(place, target, entry, pieces)

    async def _body(self) -> AsyncIterator[bytes]:
        """Of the request, counted and hashed."""
        async for piece in self._asked.pieces():
            self._terms.journal.count(len(piece))
            await self._sent.add(piece)
            yield piece
        self._sent_whole = True

    async def _compared(
        self, pieces: AsyncIterator[bytes] | None
    ) -> tuple[str | None, AsyncIterator[bytes] | None]:
        """(the hash of the request's body, its pieces once more). None: it is too long to be held here."""
        if pieces is None:
            return NOTHING, None
        held, size, digest = [], 0, sha256()
        async for piece in pieces:
            digest.update(piece)
            size += len(piece)
            if self._terms.outside.network:
                held.append(piece)
                if size > _COMPARED_BYTES:
                    return None, _chained(held, pieces)
        return digest.hexdigest(), _chained(held, None)

    async def _serve(self, stored: Stored) -> None:
        """What is kept here. Raises OSError."""
        self._facts |= {"status": stored.status, "headers": stored.headers, "source": stored.source}
        await self._asked.begin(stored.status, handed_on(stored.headers), length_of(by_name(stored.headers)))
        async for piece in stored.bodies.read(stored.digest):
            await self._pass(piece)
        await self._asked.finish()

    # ------------------------------------------------------------ the outside

    async def _ask(self, place: Place, target: str, entry: Entry, pieces: AsyncIterator[bytes] | None) -> None:
        """Raises Refused, OSError."""
        asked = self._asked
        keys = keys_for(self._terms.outside.keys, self._scheme, entry)
        headers = handed_on(asked.headers)
        if keys:
            headers = [(name, value) for name, value in headers if name.lower() not in _NOT_WITH_KEYS]
            headers.append(("Accept-Encoding", "identity"))
            for key in keys:
                headers, target = key.put_in(headers, target)
            self._facts["keys"] = len(keys)
        headers = [("Host", place.authority(self._scheme)), *headers]
        while True:
            there, used = await self._connection.open(self._scheme, place, entry)
            where = target if there.proxied is None else f"http://{place.authority('http')}{target}"
            sending = Sending(there.stream, asked.method, where, [*headers, *(there.proxied or ())], asked.length)
            upload = (
                asyncio.create_task(self._send(sending, pieces), name="upload") if pieces is not None else None
            )
            try:
                try:
                    if upload is None:
                        await sending.send(None)
                    await sending.answer.head(self._terms.journal.count)
                except OSError as error:
                    if self._failure is not None:
                        raise self._failure from None
                    self._connection.close()
                    if used and pieces is None and asked.method in _MAY_BE_TWICE:
                        continue  # it was closed while nobody asked for anything
                    why = str(error) or type(error).__name__
                    raise Refused(f"{place} broke off: {why}", 502) from None
                await self._hand_on(sending.answer, keys, place)
                if not sending.reusable:
                    self._connection.close()
                return
            except BaseException:
                self._connection.close()
                raise
            finally:
                if upload is not None:
                    upload.cancel()
                    with suppress(asyncio.CancelledError):
                        await upload

    async def _send(self, sending: Sending, pieces: AsyncIterator[bytes]) -> None:
        """The request with its body. Its answer may come before, and says more than what breaks here."""
        with suppress(Refused, OSError):
            await sending.send(self._noted(pieces))

    async def _noted(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What the sandbox fails by ends the connection, so that no answer is waited for."""
        try:
            async for piece in pieces:
                yield piece
        except (Refused, OSError) as error:
            self._failure = error
            self._connection.close()
            raise

    async def _hand_on(self, answer: Answer, keys: tuple[BorderKey, ...], place: Place) -> None:
        """Raises Refused, OSError."""
        headers, reason, redaction = handed_on(answer.headers), answer.reason, Redaction(keys) if keys else None
        if redaction is not None:
            packed = [value for name, value in headers if name.lower() == "content-encoding"]
            if any(value.strip().lower() not in ("", "identity") for value in packed):
                raise Refused(f"{place} packs its answer though asked not to: no key can be found", 502)
            headers = [(redaction.text(name), redaction.text(value)) for name, value in headers]
            reason = redaction.text(reason)
        framed = [*headers, *framing(answer.length)]
        on_record = _on_record(framed)
        self._facts |= {"status": answer.status, "headers": on_record, "source": "network"}
        self._is_fresh = len(on_record) == len(framed)  # else nobody could say whether it may be given to others
        await self._asked.begin(answer.status, headers, answer.length, reason=reason)
        try:
            async for piece in answer.pieces():
                if redaction is None:
                    await self._pass(piece)
                    continue
                for start in range(0, len(piece), _SEARCHED_BYTES):
                    await self._pass(redaction.feed(piece[start : start + _SEARCHED_BYTES]))
                    await asyncio.sleep(0)
            if self._failure is not None and answer.ends_by_closing:
                raise self._failure  # which closed the connection: the answer only seems to be whole
            if redaction is not None:
                await self._pass(redaction.end())
        finally:
            self._facts["redacted"] = redaction.count if redaction is not None else 0
        await self._asked.finish()

    async def _pass(self, piece: bytes) -> None:
        """Of the answer's body, to the sandbox."""
        if piece:
            self._terms.journal.count(len(piece))
            await self._received.add(piece)
            await self._asked.add(piece)


async def _chained(held: list[bytes], rest: AsyncIterator[bytes] | None) -> AsyncIterator[bytes]:
    for piece in held:
        yield piece
    if rest is not None:
        async for piece in rest:
            yield piece


def _demand_plain(asked: Asked) -> None:
    """Raises Refused for a request to speak something else: HTTP/2 (h2c) is an offer, which is not taken."""
    wanted = words(asked.values("upgrade"))
    if wanted - {"h2c", ""}:
        raise Refused(f"{', '.join(sorted(wanted))[:60]} is not carried: there is HTTP/1.1 alone", 501)


def _on_record(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Values of cookies may be somebody's right to come in: each stands as a part of its hash."""
    return bounded(
        [(name, _no_cookie(value) if name.lower() == "set-cookie" else value) for name, value in headers]
    )


def _no_cookie(value: str) -> str:
    return _COOKIE.sub(lambda match: f"{match[1]}{sha256(match[2].encode('latin-1')).hexdigest()[:16]}", value)
