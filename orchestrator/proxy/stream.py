"""One stream of a sandbox as an asyncio transport: what a way reads and writes is an ordinary stream of asyncio.

Each side may send what the other side has given credit for, so a slow reader holds up its own stream alone. The
relay owns the stream: it brings what the sandbox sent, and asks for frames when the channel takes more.
"""

from __future__ import annotations

import asyncio
from asyncio import protocols
from collections import deque
from collections.abc import Callable
from typing import Any

from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import ProtocolError

WINDOW_BYTES = 64 << 10  # that may be sent without credit, as the contract says
MAX_WINDOW_BYTES = 512 << 10  # of a stream whose way reads as fast as the sandbox sends
MAX_DATA_BYTES = 256 << 10  # of one frame
# So much of a way's waits here before it is asked to pause: more where the sandbox takes it.
_HIGH_WATER_BYTES, _MAX_HIGH_WATER_BYTES = 64 << 10, 1 << 20


class Room:
    """Bytes that the sandbox may have under way in all its streams beyond WINDOW_BYTES of each."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> bool:
        """False: there are not so many."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """What was taken."""
        self._left += size


class Stream(asyncio.Transport):
    """`ready`: called when it has frames to send. A stream is `over` when none of its frames matter any more."""

    _start_tls_compatible = True  # for `StreamWriter.start_tls`

    def __init__(
        self, number: int, ready: Callable[[Stream], None], room: Room, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._is_full = False  # the protocol was asked to pause
        self.number = number
        self.over = False
        self._ready, self._room = ready, room
        self._loop = loop
        self._protocol: Any = None
        # From the sandbox.
        self._window, self._owed = WINDOW_BYTES, 0  # it may have sent so much; so much credit is due
        self._unsent = WINDOW_BYTES  # of its credit
        self._arrived: deque[bytes] = deque()
        self._ended = self._eof_given = False
        self._paused = False
        # To the sandbox.
        self._credit = WINDOW_BYTES
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._eof = self._eof_sent = self._closing = False

    # ------------------------------------------------------------ for the relay

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """The protocol is connected."""
        self._protocol = protocol
        protocol.connection_made(self)

    def take_data(self, data: bytes) -> None:
        """Raises ProtocolError: more than the credit, or after the end."""
        if self._ended:
            raise ProtocolError("data on a stream after its end")
        self._unsent -= len(data)
        if self._unsent < 0:
            raise ProtocolError("more data on a stream than there is credit for")
        if self._closing:
            return
        if self._paused or self._arrived:
            self._arrived.append(data)
        else:
            self._give(data)

    def take_credit(self, size: int) -> None:
        """The sandbox takes so much more. Raises ProtocolError."""
        self._credit += size
        if self._credit > 1 << 31:
            raise ProtocolError("more credit on a stream than there can be")
        if self._waiting:
            self._ready(self)

    def take_end(self) -> None:
        """The sandbox sends nothing more. Raises ProtocolError."""
        if self._ended:
            raise ProtocolError("a stream ends twice")
        self._ended = True
        self.over = self._eof_sent
        if not self._arrived and not self._paused:
            self._give_eof()

    def lose(self, error: Exception | None = None) -> None:
        """The stream is gone. Idempotent."""
        self.over = True
        self._room.give_back(self._window - WINDOW_BYTES)
        self._window = WINDOW_BYTES
        self._arrived.clear()
        self._waiting.clear()
        self._size = 0
        self._closing = True
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            self._loop.call_soon(protocol.connection_lost, error)

    @property
    def has_frames(self) -> bool:
        """Whether `put_frame` would put one."""
        if self.over:
            return False
        sendable = self._waiting and self._credit > 0
        ends = not self._waiting and (self._closing or (self._eof and not self._eof_sent))
        return bool(sendable or ends or self._credit_due)

    def put_frame(self, frames: Any, room: int) -> int:
        """Adds its next frame. Returns how many bytes of data it has: at most `room`, which is above 0."""
        if self._credit_due:
            frames.add(stream=self.number, credit=self._owed)
            self._unsent += self._owed
            self._owed = 0
            return 0
        if self._waiting:
            data = self._next_piece(min(room, self._credit, MAX_DATA_BYTES))
            frames.add(stream=self.number, data=data)
            return len(data)
        if self._closing:
            if not (self._ended and self._eof_sent):
                frames.add(stream=self.number, end=pb.STREAM_END_CLOSE)
            self.lose()
            return 0
        frames.add(stream=self.number, end=pb.STREAM_END_DATA)
        self._eof_sent = True
        self.over = self._ended
        return 0

    @property
    def _credit_due(self) -> bool:
        return not self._ended and not self._closing and self._owed >= self._window // 2

    def _next_piece(self, most: int) -> bytes:
        """At most so much of what waits. Small pieces make one."""
        pieces, size = [], 0
        while self._waiting and size < most:
            piece = self._waiting.popleft()
            if len(piece) > most - size:
                self._waiting.appendleft(piece[most - size :])
                piece = piece[: most - size]
            pieces.append(piece)
            size += len(piece)
        self._size -= size
        self._credit -= size
        if self._is_full and self._size <= self._high_water // 4:
            self._is_full = False
            self._protocol.resume_writing()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # ------------------------------------------------------------ towards the protocol

    def _give(self, data: bytes) -> None:
        protocol = self._protocol
        if protocol is None:
            return
        if isinstance(protocol, asyncio.BufferedProtocol):
            protocols._feed_data_to_buffered_proto(protocol, data)  # type: ignore[attr-defined]
        else:
            protocol.data_received(data)
        self._owed += len(data)
        # It reads as fast as the sandbox sends: the sandbox may have more under way.
        may_grow = self._owed >= self._window // 2 and not self._paused and self._window < MAX_WINDOW_BYTES
        if may_grow and self._room.take(self._window):
            self._owed += self._window
            self._window *= 2
        if self._credit_due:
            self._ready(self)

    def _give_all(self) -> None:
        while self._arrived and not self._paused and self._protocol is not None:
            self._give(self._arrived.popleft())
        if self._ended and not self._arrived and not self._paused:
            self._give_eof()

    def _give_eof(self) -> None:
        if not self._eof_given and self._protocol is not None:
            self._eof_given = True
            if not self._protocol.eof_received():
                self.close()

    # ------------------------------------------------------------ for the protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._closing and not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._give_all)  # its caller may be in the middle of reading

    @property
    def _high_water(self) -> int:
        return min(_MAX_HIGH_WATER_BYTES, max(_HIGH_WATER_BYTES, self._credit))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Has no effect: the limits follow from the credit."""

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._high_water // 4, self._high_water

    def get_write_buffer_size(self) -> int:
        return self._size

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._eof or self._closing or not data:
            return  # as a socket's: what is written after the end goes nowhere
        self._waiting.append(data if isinstance(data, bytes) else bytes(data))
        self._size += len(data)
        if self._credit > 0:
            self._ready(self)
        if not self._is_full and self._size > self._high_water:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._eof and not self._closing:
            self._eof = True
            self._ready(self)

    def close(self) -> None:
        """What was written is sent before. Idempotent."""
        if not self._closing:
            self._closing = True
            self._arrived.clear()
            if self.over:
                self.lose()
            else:
                self._ready(self)

    def abort(self) -> None:
        """Resets the stream. Idempotent."""
        self._force_close(None)

    def _force_close(self, error: Exception | None) -> None:
        """SSL in asyncio calls it, of all transports."""
        gone = self.over
        self.lose(error)
        if not gone:
            self._ready(self)  # finds it over, and tells the sandbox


class _Protocol(asyncio.StreamReaderProtocol):
    """Of a pair of asyncio. Whoever waits for neither reading nor writing need not hear why the stream is gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        closed = self._get_close_waiter(None)  # type: ignore[attr-defined]
        if not closed.cancelled():
            closed.exception()  # marked as retrieved, so that asyncio does not report it


def connected(
    stream: Stream, begin: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None], limit: int
) -> None:
    """Gives `begin` the stream as a pair of asyncio, as `asyncio.start_server` does."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    stream.begin(_Protocol(reader, begin, loop=loop))
