"""The streams of one sandbox: what programs in it connect to is answered here, by the lease's ways.

All streams share one call of the channel, in frames. Whatever the sandbox sends is counted before it is looked at:
its bytes by the lease, its share of the event loop's time here. A sandbox that keeps to no rules of the contract
loses its lease. Streams run on the rollout's own clock: a program that waits for one uses its time up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.stream import Room, Stream, connected
from orchestrator.rules.waits import first_of
from orchestrator.types import Way

log = logging.getLogger(__name__)

MAX_STREAMS = 128  # at a time; as the contract says
MAX_CARRIED = 2 * MAX_STREAMS  # ways at work, those included that come to an end
_READER_BYTES = 64 << 10  # as asyncio has it
_MESSAGE_BYTES, _MESSAGE_FRAMES = 1 << 20, 128
_ROOM_BYTES = 8 << 20
# What a message, a frame and a new stream take of the event loop; and how much of its time one
# sandbox may take by sending them, and save up.
_MESSAGE_S, _FRAME_S, _OPEN_S = 60e-6, 10e-6, 60e-6
_SHARE, _SAVED_S = 0.3, 0.5
_MESSAGE_COST, _FRAME_COST = 256, 64  # bytes of the lease's budget, besides the data

Write = Callable[[pb.RelayResponse], Awaitable[None]]


class Relay:
    """`ways`: by the number of their listener. `spend`: takes bytes of the lease's budget; False: there are not so
    many, and the lease has ended."""

    def __init__(self, ways: Sequence[Way], spend: Callable[[int], bool]) -> None:
        self._ways = tuple(ways)
        self._spend = spend
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection: _Connection | None = None
        self._closed = asyncio.Event()

    async def serve(self, messages: AsyncIterator[bytes], write: Write) -> None:
        """Carries streams until the sandbox hangs up, calls once more, or the relay is closed; then the
        streams are gone. Raises ProtocolError."""
        if self._closed.is_set():
            return
        if self._connection is not None:
            self._connection.replaced.set()
        connection = self._connection = _Connection(self._begin, len(self._ways), self._spend)
        try:
            await first_of(
                connection.receive(messages),
                connection.send(write),
                connection.replaced.wait(),
                self._closed.wait(),
            )
        finally:
            connection.lose()
            if self._connection is connection:
                self._connection = None

    async def aclose(self) -> None:
        """Ends all streams, and waits for their ways. Idempotent."""
        self._closed.set()
        if self._connection is not None:
            self._connection.lose()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _begin(self, listener: int, stream: Stream) -> asyncio.Task[None] | None:
        """The task that carries the stream; None: there are too many."""
        if len(self._tasks) >= MAX_CARRIED or self._closed.is_set():
            return None
        begun: list[asyncio.Task[None]] = []
        way = self._ways[listener]

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = f"stream {stream.number}"
            task = asyncio.get_running_loop().create_task(_carry(way, reader, writer, stream), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            begun.append(task)

        connected(stream, begin, _READER_BYTES)
        return begun[0]


async def _carry(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> None:
    try:
        await way.carry(reader, writer)
    except asyncio.CancelledError:
        stream.abort()
        raise
    except Exception as error:  # whatever a way raises resets its stream
        log.debug("a stream was reset: %s: %s", type(error).__name__, error)
        writer.transport.abort()
        stream.abort()
    else:
        writer.close()


class _Connection:
    """One call, with its streams."""

    def __init__(
        self,
        begin: Callable[[int, Stream], asyncio.Task[None] | None],
        listeners: int,
        spend: Callable[[int], bool],
    ) -> None:
        self._begin, self._listeners, self._spend = begin, listeners, spend
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, tuple[Stream, asyncio.Task[None]]] = {}
        self._last = 0  # the number of the newest stream
        self._room = Room(_ROOM_BYTES)
        self._ready: dict[Stream, None] = {}  # in turn
        self._resets: deque[int] = deque()
        self._wake = asyncio.Event()
        self._due_s = self._loop.time()  # when what was taken so far is paid for
        self.replaced = asyncio.Event()

    # ------------------------------------------------------------ from the sandbox

    async def receive(self, messages: AsyncIterator[bytes]) -> None:
        """Until the sandbox hangs up. Raises ProtocolError."""
        async for message in messages:
            if not self._spend(len(message) + _MESSAGE_COST):
                return
            frames = wire.relayed(message)
            taken_s = _MESSAGE_S + _FRAME_S * len(frames)
            for frame in frames:
                taken_s += self._take(frame)
            if not self._spend(_FRAME_COST * len(frames)):
                return
            await self._pause(taken_s)

    async def _pause(self, taken_s: float) -> None:
        """Until the sandbox may have the event loop's time again. What it sends meanwhile waits in the channel."""
        now = self._loop.time()
        self._due_s = max(self._due_s, now - _SAVED_S / _SHARE) + taken_s / _SHARE
        if self._due_s > now:
            await asyncio.sleep(self._due_s - now)

    def _take(self, frame: pb.Frame) -> float:
        """Returns what it takes besides. Raises ProtocolError."""
        number, what = frame.stream, frame.WhichOneof("what")
        if what == "open":
            return self._open(number, frame.open)
        if not 1 <= number <= self._last:
            raise ProtocolError("a frame of a stream that was never opened")
        if what is None:
            raise ProtocolError("a frame without anything")
        known = self._streams.get(number)
        if known is None:  # it was under way when the stream ended here
            return 0.0
        stream, task = known
        if what == "data":
            stream.take_data(frame.data)
        elif what == "credit":
            stream.take_credit(frame.credit)
        elif frame.end == pb.STREAM_END_DATA:
            stream.take_end()
            if stream.over:
                self._forget(number)
        elif frame.end in (pb.STREAM_END_CLOSE, pb.STREAM_END_RESET):
            self._forget(number)
            stream.lose(ConnectionResetError("the sandbox reset the stream"))
            task.cancel()
        else:
            raise ProtocolError(f"a stream ends by {frame.end}")
        return 0.0

    def _open(self, number: int, listener: int) -> float:
        if number <= self._last:
            raise ProtocolError("a stream is opened for the second time")
        if listener >= self._listeners:
            raise ProtocolError("a stream of a listener that there is not")
        if len(self._streams) >= MAX_STREAMS:
            raise ProtocolError(f"more than {MAX_STREAMS} streams at a time")
        self._last = number
        stream = Stream(number, self._is_ready, self._room, self._loop)
        task = self._begin(listener, stream)
        if task is None:
            self._resets.append(number)
            self._wake.set()
        else:
            self._streams[number] = stream, task
        return _OPEN_S

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)

    # ------------------------------------------------------------ to the sandbox

    def _is_ready(self, stream: Stream) -> None:
        self._ready[stream] = None
        self._wake.set()

    async def send(self, write: Write) -> None:
        """Sends what there is, one message after the other, until the budget is used up."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ready or self._resets:
                response = pb.RelayResponse()
                size = self._fill(response.frames)
                count = len(response.frames)
                if not count:
                    continue
                if not self._spend(size + _FRAME_COST * count):
                    return
                await write(response)

    def _fill(self, frames: object) -> int:
        """Frames of the streams in turn, for one message. Returns the bytes of their data."""
        size = count = 0
        while self._resets and count < _MESSAGE_FRAMES:
            frames.add(stream=self._resets.popleft(), end=pb.STREAM_END_RESET)  # type: ignore[attr-defined]
            count += 1
        while self._ready and count < _MESSAGE_FRAMES and size < _MESSAGE_BYTES:
            stream = next(iter(self._ready))
            del self._ready[stream]
            if stream.has_frames:
                size += stream.put_frame(frames, _MESSAGE_BYTES - size)
                count += 1
                if stream.has_frames:
                    self._ready[stream] = None
            elif stream.over and stream.number in self._streams:  # it was aborted here
                frames.add(stream=stream.number, end=pb.STREAM_END_RESET)  # type: ignore[attr-defined]
                count += 1
            if stream.over:
                self._forget(stream.number)
        return size

    def lose(self) -> None:
        """All streams are gone, and what carries them is cancelled. Idempotent."""
        streams, self._streams = self._streams, {}
        self._ready.clear()
        for stream, task in streams.values():
            stream.lose(ConnectionResetError("the channel is gone"))
            task.cancel()
