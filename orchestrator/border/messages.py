"""HTTP/1.1 of both sides: a message is read strictly, and what is handed on is written anew from its parts.

So whatever two readers could understand differently never gets further: it is refused, or it is gone.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

import h11

from orchestrator.border.streams import Bytes
from orchestrator.rules.egress import Refused

Headers = list[tuple[str, str]]  # names as they were written
_HEAD_BYTES = 64 << 10
_STATUS_BYTES = len("HTTP/1.1 200 \r\n\r\n")
_IDLE_S, _HEAD_S = 120.0, 30.0  # until a request begins, and until its head is there
_LINGER_S, _LINGER_BYTES = 5.0, 4 << 20
_MOST_LINES = 500  # of the head of a request
_MOST_CHUNKS = 32  # that are read in a row: each may be of one byte, and others have their turn in between
_ODD = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|\0")  # two readers may see different lines
_QUOTED = re.compile(r":? ?(?:bytearray\()?\bb['\"].*", re.DOTALL)  # how h11 ends what it says of a line
# Headers of one connection, which are not handed on; nor are those that `Connection` names.
_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-authentication-info", "transfer-encoding", "trailer", "upgrade", "http2-settings", "expect"),
        "alt-svc",
    )
)
_FRAMING = frozenset(("host", "content-length"))


class Asked:
    """One request of the sandbox, and the answer that it gets."""

    def __init__(self, stream: Bytes, connection: h11.Connection, event: h11.Request, size: int) -> None:
        self._stream, self._connection = stream, connection
        self.method = event.method.decode("ascii")
        self.target = event.target.decode("ascii", "replace")
        self.headers = [(_text(name), _text(value)) for name, value in event.headers.raw_items()]
        self.size = size
        self.begun = False
        """Whether an answer was begun."""

    def values(self, name: str) -> list[str]:
        """Of the header of this name, which is in small letters."""
        return [value for known, value in self.headers if known.lower() == name]

    @property
    def has_body(self) -> bool:
        return bool(self.values("transfer-encoding")) or self.values("content-length") not in ([], ["0"])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Its body. Raises Refused, OSError."""
        try:
            async for piece in _pieces(self._connection, self._more):
                yield piece
        except h11.RemoteProtocolError as error:
            raise _not_http(error) from None
        self._stream.unread(self._connection.trailing_data[0])

    async def _more(self) -> None:
        if self._connection.they_are_waiting_for_100_continue and not self.begun:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        if not (data := await self._stream.read()):
            raise ConnectionResetError("the request has no end")
        self._connection.receive_data(data)

    async def begin(self, status: int, headers: Headers, *, close: bool = False, reason: str = "") -> None:
        """The head of the answer. Raises OSError."""
        self.begun = True
        lines = [*headers, *([("Connection", "close")] if close else [])]
        try:
            words = reason.encode("latin-1", "replace")
            await self._send(h11.Response(status_code=status, headers=_written(lines), reason=words))
        except h11.LocalProtocolError as error:
            self.begun = False
            raise Refused(f"the answer is no HTTP: {_why(error)}", 502) from None

    async def add(self, data: bytes) -> None:
        """Of the answer's body. Raises OSError."""
        try:
            await self._send(h11.Data(data=data))
        except h11.LocalProtocolError:
            raise ConnectionResetError("the answer is longer than it says") from None

    async def finish(self) -> None:
        """Raises OSError."""
        try:
            await self._send(h11.EndOfMessage())
        except h11.LocalProtocolError:
            raise ConnectionResetError("the answer is shorter than it says") from None

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on its connection."""
        return self._connection.our_state is h11.DONE and self._connection.their_state is h11.DONE

    async def refuse(self, refused: Refused) -> None:
        """The request does not leave, which its answer says. Raises OSError."""
        body = f"{refused}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        await self.begin(refused.status, headers, close=self.has_body, reason=HTTPStatus(refused.status).phrase)
        if self.method != "HEAD":
            await self.add(body)
        await self.finish()

    async def _send(self, event: h11.Event) -> None:
        if data := self._connection.send(event):
            await self._stream.write(data)


async def read_request(stream: Bytes) -> Asked | None:
    """The next request of the sandbox. None: there comes none. Raises Refused, OSError."""
    try:
        async with asyncio.timeout(_IDLE_S):
            data = await stream.read()
        async with asyncio.timeout(_HEAD_S):
            head = await _head(stream, data)
    except TimeoutError:
        raise Refused("the request took too long to come", 408) from None
    if not head:
        return None
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise _not_http(error) from None
    if not isinstance(event, h11.Request):
        raise Refused("this is no HTTP/1.1", 400)
    asked = Asked(stream, connection, event, len(head))
    if asked.values("transfer-encoding") and asked.values("content-length"):
        raise Refused("a request says its length in one way alone", 400)
    return asked


async def _head(stream: Bytes, data: bytes) -> bytes:
    """Up to the empty line; what follows is unread. Empty: there is none. Raises Refused, OSError."""
    head = bytearray(data.removeprefix(b"\r\n"))
    looked = 0
    while (end := head.find(b"\r\n\r\n", max(0, looked - 3))) < 0:
        if head.find(b"\n\n", max(0, looked - 1)) >= 0:
            raise Refused("lines end with CR and LF", 400)
        if len(head) > _HEAD_BYTES:
            raise Refused(f"the head of the request is over {_HEAD_BYTES} bytes", 431)
        looked = len(head)
        if not (data := await stream.read()):
            if head:
                raise ConnectionResetError("the request has no end")
            return b""
        head += data
    stream.unread(bytes(head[end + 4 :]))
    whole = bytes(head[: end + 4])
    if len(whole) > _HEAD_BYTES:
        raise Refused(f"the head of the request is over {_HEAD_BYTES} bytes", 431)
    if whole.count(b"\n") > _MOST_LINES:
        raise Refused(f"the head of the request has over {_MOST_LINES} lines", 431)
    if _ODD.search(whole):
        raise Refused("lines end with CR and LF, and none goes on in the next one", 400)
    return whole


def _not_http(error: h11.RemoteProtocolError) -> Refused:
    return Refused(f"this is no HTTP/1.1 that can be read in one way: {_why(error)}", error.error_status_hint)


def _why(error: h11.ProtocolError) -> str:
    """Without the line that it quotes: a key may stand in it."""
    return _QUOTED.sub("", str(error))


class Answer:
    """What came of a request that was sent on. It is read to its end, or the connection is not used again."""

    def __init__(self, stream: Bytes, connection: h11.Connection) -> None:
        self._stream, self._connection = stream, connection
        self.status, self.reason = 0, ""
        self.headers: Headers = []

    async def head(self, count: Callable[[int], None]) -> None:
        """`count`: is told how many bytes come, also of the answers before the answer (1xx). Raises Refused,
        OSError."""
        while True:
            event = await self._next()
            if not isinstance(event, h11.Response | h11.InformationalResponse) or event.status_code == 101:
                raise Refused("the other side does not speak HTTP/1.1", 502)
            lines = event.headers.raw_items()
            count(_STATUS_BYTES + len(event.reason) + sum(len(name) + len(value) + 4 for name, value in lines))
            if isinstance(event, h11.Response):
                break
            await asyncio.sleep(0)
        self.status, self.reason = event.status_code, _text(event.reason)
        self.headers = [(_text(name), _text(value)) for name, value in event.headers.raw_items()]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises OSError: it breaks off."""
        try:
            async for piece in _pieces(self._connection, self._more):
                yield piece
        except h11.RemoteProtocolError as error:
            raise ConnectionResetError(str(_unreadable(error))) from None

    @property
    def reusable(self) -> bool:
        """Whether its connection may be asked again."""
        connection = self._connection
        left = connection.trailing_data[0]
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE and not left

    async def _next(self) -> object:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                await self._more()
        except h11.RemoteProtocolError as error:
            raise _unreadable(error) from None
        return event

    async def _more(self) -> None:
        data = await self._stream.read()
        if not data and self._connection.their_state is h11.SEND_RESPONSE:
            raise ConnectionResetError("the other side hung up without an answer")
        self._connection.receive_data(data)


def _unreadable(error: h11.RemoteProtocolError) -> Refused:
    return Refused(f"the other side's answer cannot be read: {_why(error)}", 502)


async def _pieces(connection: h11.Connection, more: Callable[[], Awaitable[None]]) -> AsyncIterator[bytes]:
    """Of a body, until its end: chunks that are there together make one. `more`: has the connection receive data.
    Raises h11.RemoteProtocolError, OSError."""
    chunks: list[bytes] = []
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            chunks.append(event.data)
            if len(chunks) < _MOST_CHUNKS:
                continue
            await asyncio.sleep(0)
        if chunks:
            yield b"".join(chunks)
            chunks = []
        if event is h11.NEED_DATA:
            await more()
        elif isinstance(event, h11.EndOfMessage):
            return
        elif not isinstance(event, h11.Data):
            raise ConnectionResetError("the message broke off")


class Sending:
    """A request on its way out."""

    def __init__(self, stream: Bytes, method: str, target: str, headers: Headers) -> None:
        """Raises Refused."""
        self._stream = stream
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self.answer = Answer(stream, self._connection)
        try:
            request = h11.Request(method=method, target=target, headers=_written(headers))
            self._head = self._connection.send(request) or b""
        except h11.LocalProtocolError as error:
            raise Refused(f"the request cannot be written: {_why(error)}", 400) from None

    async def send(self, pieces: AsyncIterator[bytes] | None) -> None:
        """With its body, if there is one. Raises Refused, OSError."""
        if pieces is None:
            await self._stream.write(self._head + (self._connection.send(h11.EndOfMessage()) or b""))
            return
        await self._stream.write(self._head)
        try:
            async for piece in pieces:
                await self._stream.write(self._connection.send(h11.Data(data=piece)) or b"")
            await self._stream.write(self._connection.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError as error:
            raise ConnectionResetError(str(error)) from None


def handed_on(headers: Sequence[tuple[str, str]]) -> Headers:
    """Without those of one connection, and without those that frame a message."""
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == "connection"
        for word in value.split(",")
    }
    dropped = _HOP | _FRAMING | named
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def framing(headers: Sequence[tuple[str, str]]) -> Headers:
    """The header that says how long a body is, if one does: the length, or that it comes in chunks."""
    values = {
        name.lower(): value for name, value in headers if name.lower() in ("content-length", "transfer-encoding")
    }
    if "transfer-encoding" in values:
        return [("Transfer-Encoding", "chunked")]
    return [("Content-Length", values["content-length"])] if "content-length" in values else []


async def linger(stream: Bytes) -> None:
    """Waits until the other side has read all: what it has sent beyond would else cut the answer off."""
    left = _LINGER_BYTES
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(_LINGER_S):
            await stream.end()
            while left > 0 and (data := await stream.read()):
                left -= len(data)


def _written(headers: Headers) -> list[tuple[bytes, bytes]]:
    """As they came: values may have bytes beyond ASCII, which h11 takes as bytes alone."""
    return [(name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in headers]


def _text(value: bytes) -> str:
    return value.decode("latin-1")
