"""Messages of both sides of the border: what is handed on is written anew from its parts.

So whatever two readers could understand differently never gets further: it is refused, or it is gone.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

from orchestrator.border.http1 import (
    Framing,
    Head,
    Headers,
    Length,
    answer_of,
    length_of,
    pieces,
    read_head,
    request_line,
    request_of,
    status_line,
    words,
    written,
)
from orchestrator.border.streams import Bytes
from orchestrator.rules.egress import Refused

_IDLE_S, _HEAD_S = 120.0, 30.0  # until a request begins, and until its head is there
_LINGER_S, _LINGER_BYTES = 5.0, 4 << 20
_MOST_BEFORE = 100  # 1xx, of which servers give a few: each has what follows it copied
_BODILESS = frozenset((204, 304))  # statuses
_EMPTY_LINE = b"\r\n\r\n"
# Headers of one connection, which are not handed on; nor are those that `Connection` names.
_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-authentication-info", "transfer-encoding", "trailer", "upgrade", "http2-settings", "expect"),
        "alt-svc",
    )
)
_DROPPED = _HOP | {"host", "content-length"}


class Asked:
    """One request of the sandbox, and the answer that it gets."""

    def __init__(self, stream: Bytes, head: str) -> None:
        """Raises Refused."""
        self._stream, self._head = stream, (read := request_of(head))
        (self.method, self.target), self.headers, self.size = read.first, read.headers, len(head)
        self.length = length_of(read.named)
        if self.length == "chunked" and (self.values("content-length") or not read.is_new):
            raise Refused("a request says its length in one way alone", 400)
        self.has_body = self.length not in (None, 0)
        self._keeps = not read.closes
        self._is_waited_for = read.is_new and "100-continue" in words(self.values("expect"))
        self._is_read = not self.has_body
        self._framing: Framing | None = None

    @property
    def begun(self) -> bool:
        """Whether an answer was begun."""
        return self._framing is not None

    def values(self, name: str) -> Sequence[str]:
        """Of the header of this name, which is in small letters."""
        return self._head.named.get(name, ())

    async def pieces(self) -> AsyncIterator[bytes]:
        """Its body. Raises Refused, OSError."""
        async for piece in pieces(self.length or 0, self._more, self._stream.unread):
            yield piece
        self._is_read = True

    async def _more(self) -> bytes:
        if self._is_waited_for and not self.begun:
            await self._stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._is_waited_for = False
        return await self._stream.read()

    async def begin(
        self, status: int, headers: Headers, length: Length, *, close: bool = False, reason: str = ""
    ) -> None:
        """The head of the answer; `headers` without those that frame it. Raises Refused, OSError."""
        if length in ("chunked", None) or status == 204:  # which has no Content-Length (RFC 9110, 8.6)
            can_be_chunked = self._head.is_new and status not in _BODILESS
            length = "chunked" if can_be_chunked else None
        lines = [*headers, *framing(length)]
        if self.method == "HEAD" or status in _BODILESS:
            length = 0
        self._keeps = self._keeps and not close and length is not None
        if not self._keeps:
            lines.append(("Connection", "close"))
        data = written(status_line(status, reason), lines)
        self._framing = Framing(length)
        await self._stream.write(data)

    async def add(self, data: bytes) -> None:
        """Of the answer's body. Raises OSError."""
        assert self._framing is not None
        await self._stream.write(self._framing.piece(data))

    async def finish(self) -> None:
        """Raises OSError."""
        assert self._framing is not None
        if data := self._framing.end():
            await self._stream.write(data)

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on its connection."""
        return self._keeps and self._is_read and self._framing is not None and self._framing.is_done

    async def refuse(self, refused: Refused) -> None:
        """The request does not leave, which its answer says. Raises OSError."""
        body = f"{refused}\n".encode()
        headers, reason = [("Content-Type", "text/plain; charset=utf-8")], HTTPStatus(refused.status).phrase
        await self.begin(refused.status, headers, len(body), close=True, reason=reason)
        if self.method != "HEAD":
            await self.add(body)
        await self.finish()


async def read_request(stream: Bytes) -> Asked | None:
    """The next request of the sandbox. None: there comes none. Raises Refused, OSError."""
    try:
        async with asyncio.timeout(_IDLE_S) as limit:
            if _EMPTY_LINE not in (data := await stream.read()):
                limit.reschedule(asyncio.get_running_loop().time() + _HEAD_S)
            head = await read_head(data, stream.read, stream.unread, strictly=True)
    except TimeoutError:
        raise Refused("the request took too long to come", 408) from None
    return Asked(stream, head) if head else None


class Answer:
    """What came of a request that was sent on. It is read to its end, or the connection is not used again."""

    def __init__(self, stream: Bytes, method: str) -> None:
        self._stream, self._method = stream, method
        self.status, self.reason = 0, ""
        self.headers: Headers = []
        self.length: Length = None
        self._keeps = self._is_read = self._is_empty = False

    async def head(self, count: Callable[[int], None]) -> None:
        """`count`: is told how many bytes come, also of the answers before the answer (1xx). Raises Refused,
        OSError."""
        for _ in range(_MOST_BEFORE):
            try:
                head, size = await self._head()
            except Refused as refused:
                raise Refused(f"the other side's answer cannot be read: {refused}", 502) from None
            count(size)
            if self.status >= 200:
                break
            await asyncio.sleep(0)
        else:
            raise Refused(f"the other side gives {_MOST_BEFORE} answers (1xx) before its answer", 502)
        self._keeps = not head.closes and not self.ends_by_closing

    async def _head(self) -> tuple[Head, int]:
        """(the next one, its bytes). Raises Refused, OSError."""
        stream = self._stream
        text = await read_head(await stream.read(), stream.read, stream.unread, strictly=False)
        if not text:
            raise ConnectionResetError("the other side hung up without an answer")
        head = answer_of(text)
        self.status, self.reason, self.headers = int(head.first[0]), head.first[1], head.headers
        if self.status == 101:
            raise Refused("it changes to something that is no HTTP/1.1", 502)
        self.length = length_of(head.named)
        self._is_empty = self._method == "HEAD" or self.status in _BODILESS
        return head, len(text)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises OSError: it breaks off."""
        try:
            async for piece in pieces(
                0 if self._is_empty else self.length, self._stream.read, self._stream.unread
            ):
                yield piece
        except Refused as refused:
            raise ConnectionResetError(f"the other side's answer cannot be read: {refused}") from None
        self._is_read = True

    @property
    def ends_by_closing(self) -> bool:
        """Whether nothing but the end of its connection says where it ends."""
        return self.length is None and not self._is_empty

    @property
    def leaves_open(self) -> bool:
        """Whether it was read to its end, and the other side waits for more."""
        return self._keeps and self._is_read


class Sending:
    """A request on its way out."""

    def __init__(self, stream: Bytes, method: str, target: str, headers: Headers, length: Length) -> None:
        """`headers`: without those that frame it. Raises Refused."""
        self._stream = stream
        self._head = written(request_line(method, target), [*headers, *framing(length)])
        self._framing = Framing(length or 0)
        self.answer = Answer(stream, method)

    async def send(self, body: AsyncIterator[bytes] | None) -> None:
        """With its body, if there is one. Raises Refused, OSError."""
        if body is None:
            await self._stream.write(self._head + self._framing.end())
            return
        await self._stream.write(self._head)
        async for piece in body:
            await self._stream.write(self._framing.piece(piece))
        await self._stream.write(self._framing.end())

    @property
    def reusable(self) -> bool:
        """Whether its connection may be asked again."""
        return self._framing.is_done and self.answer.leaves_open


def handed_on(headers: Sequence[tuple[str, str]]) -> Headers:
    """Without those of one connection, and without those that frame a message."""
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _DROPPED | words(value for name, value in lower if name == "connection")
    return [header for (name, _), header in zip(lower, headers, strict=True) if name not in dropped]


def framing(length: Length) -> Headers:
    """The header that says how long a body is, if one does."""
    if length == "chunked":
        return [("Transfer-Encoding", "chunked")]
    return [("Content-Length", str(length))] if length is not None else []


async def linger(stream: Bytes) -> None:
    """Waits until the other side has read all: what it has sent beyond would else cut the answer off."""
    left = _LINGER_BYTES
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(_LINGER_S):
            await stream.end()
            while left > 0 and (data := await stream.read()):
                left -= len(data)
