"""Both ends of a connection as one thing: bytes that come, bytes that go; plain, or inside TLS.

TLS is done here over the bytes themselves, and not by asyncio: what came is looked at before it is decided who
ends TLS, and a tunnel may lead through a proxy that speaks TLS itself.
"""

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from typing import Protocol, Self, cast

PIECE_BYTES = 256 << 10  # that are read at a time
_MOST_WAITING_BYTES = 512 << 10  # of what came; more stays with the kernel
_MOST_WAITING_PIECES = 64  # also of one byte: they are read in one turn, and each takes its time


class Bytes(Protocol):
    """A connection."""

    async def read(self) -> bytes:
        """What has come, at least one byte; empty at the end. Raises OSError."""
        ...

    async def write(self, data: bytes) -> None:
        """Waits while the other side is slow. Raises OSError."""
        ...

    async def end(self) -> None:
        """Nothing more is written."""
        ...

    def unread(self, data: bytes) -> None:
        """What was read comes again."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Socket(asyncio.Protocol):
    """A connection to the outside. What comes is handed on as it came, and is not copied."""

    def __init__(self) -> None:
        self._transport = cast("asyncio.Transport", None)  # until it is connected
        self._pieces, self._size = deque[bytes](), 0
        self._ended = self._lost = False
        self._error: Exception | None = None
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        """Raises OSError."""
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    @property
    def is_quiet(self) -> bool:
        """Whether the other side has neither hung up nor said anything that was not read."""
        return not (self._pieces or self._ended or self._lost)

    async def read(self) -> bytes:
        while not self._pieces:
            if self._error is not None and not self._ended:
                raise self._error
            if self._ended or self._lost:
                return b""
            self._news.clear()
            await self._news.wait()
        data = self._pieces.popleft()
        self._size -= len(data)
        if self._size < _MOST_WAITING_BYTES:
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        self._demand()
        self._transport.write(data)
        if not self._room.is_set():
            await self._room.wait()
            self._demand()

    async def end(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.set_write_buffer_limits(0)  # to wait until all is with the kernel
            await self._room.wait()

    def unread(self, data: bytes) -> None:
        if data:
            self._pieces.appendleft(data)
            self._size += len(data)

    def close(self) -> None:
        self._transport.abort()  # who never reads would else keep it for ever

    def _demand(self) -> None:
        if self._lost:
            raise self._error or ConnectionResetError("the connection was lost")

    # ------------------------------------------------------------ for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= _MOST_WAITING_BYTES or len(self._pieces) >= _MOST_WAITING_PIECES:
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        self._ended = True
        self._news.set()
        return True  # this side may go on writing

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._error = True, exc
        self._news.set()
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()


class Plain:
    """A pair of asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unread = b""

    async def read(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        return await self._reader.read(PIECE_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def end(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def unread(self, data: bytes) -> None:
        self._unread = data + self._unread

    def close(self) -> None:
        self._writer.close()


class Tls:
    """TLS over another connection. The handshake comes first."""

    def __init__(self, under: Bytes, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host`: whose certificate is demanded, of a client; None: this is the server's side."""
        self._under = under
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._unread, self._ended = b"", False

    async def handshake(self) -> None:
        """Raises OSError (ssl.SSLError is one)."""
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionResetError("it ended in the TLS handshake") from None
            except ssl.SSLError:
                await self._flush()  # the alert
                raise

    async def read(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        while True:
            pieces, size = [], 0
            try:
                while size < PIECE_BYTES and not self._ended:
                    pieces.append(piece := self._tls.read(PIECE_BYTES))
                    size += len(piece)
                    self._ended = not piece
                return b"".join(pieces)
            except ssl.SSLWantReadError:
                if pieces:
                    return b"".join(pieces)
                await self._flush()  # what the protocol itself has to say
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self._ended = True
                return b"".join(pieces)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            self._tls.write(view[start : start + PIECE_BYTES])
            await self._flush()

    async def end(self) -> None:
        with suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()  # it says goodbye and does not wait for an answer
        await self._flush()
        await self._under.end()

    def unread(self, data: bytes) -> None:
        self._unread = data + self._unread

    @property
    def is_quiet(self) -> bool:
        """Whether it goes on, and holds nothing that was not read."""
        return not (self._unread or self._ended or self._tls.pending() or self._incoming.pending)

    def close(self) -> None:
        self._under.close()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._under.write(self._outgoing.read())

    async def _fill(self) -> bool:
        data = await self._under.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return bool(data)
