"""Streams of the agent's programs: each connection to a listener is carried to the orchestrator, as raw bytes.

Nothing here knows what the bytes mean. All streams share one call, in frames. There are three threads whatever the
programs do: one waits for the sockets, one for the orchestrator's frames, and gRPC's own sends ours. Memory is
bounded: each side may send what the other has given credit for, connections beyond MAX_STREAMS wait in the kernel,
and nothing is read from programs while OUTBOX_BYTES wait to be sent.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
from rollout_api.v1 import sandbox_pb2 as pb

MAX_STREAMS = 128  # as the contract says, and the next
WINDOW_BYTES = 64 << 10
MAX_WINDOW_BYTES = 2 << 20  # of a stream whose program reads as fast as the orchestrator sends
ROOM_BYTES = 16 << 20  # of all windows, beyond WINDOW_BYTES of each
OUTBOX_BYTES = 1 << 20
RECONNECT_S = 10.0  # as long as the other calls try
_PAUSE_S = 0.1
_BACKLOG = 512
_USUAL_PORT = 61_080  # above those that programs get without asking for one
_READ_BYTES = 64 << 10
_MESSAGE_BYTES, _MESSAGE_FRAMES = 512 << 10, 128
_FRAME_BYTES = 32  # of memory that a frame takes at least
_EVENTS = 256
_HANG_UP = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection

Call = Callable[[Iterator[pb.RelayRequest]], Iterator[pb.RelayResponse]]
_Frame = tuple[int, str, Any]  # stream, and the one field that it has besides


def _listening(host: str, port: int) -> socket.socket:
    """Port 0: the usual one, so that programs print the same of it when their record is played; any free one where
    that is taken, as by a sandbox without a loopback of its own. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or _USUAL_PORT))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        if port:
            raise
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


class Relay:
    """Listens at the addresses, in order; `start` carries what connects. Raises OSError."""

    def __init__(self, addresses: Sequence[tuple[str, int]], call: Call) -> None:
        self._call = call
        self._listeners = [_listening(host, port) for host, port in addresses]
        self.addresses: list[tuple[str, int]] = [listener.getsockname() for listener in self._listeners]

    def start(self) -> None:
        """From now on, until the orchestrator ends the lease or this process ends."""
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def _run(self) -> None:
        """Calls, and calls again where the connection was lost: the streams are gone then."""
        lost_since: float | None = None
        while True:
            streams = _Streams(self._listeners)
            try:
                for response in self._call(streams.requests()):
                    lost_since = None
                    streams.take(response)
                break  # the lease has ended
            except grpc.RpcError as error:
                now = time.monotonic()
                lost_since = lost_since or now
                code = error.code()
                if code is not grpc.StatusCode.UNAVAILABLE or now - lost_since > RECONNECT_S:
                    if code not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION):
                        print(f"no streams any more: {code.name}", file=sys.stderr, flush=True)
                    break
            finally:
                streams.close()
            time.sleep(_PAUSE_S)
        for listener in self._listeners:
            listener.close()


class _Stream:
    """One connection. `pending`: what the program has not taken yet; `end`: what follows that."""

    __slots__ = ("credit", "end", "ended", "number", "owed", "pending", "socket", "waits", "window")

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.socket = number, connection
        self.credit = WINDOW_BYTES  # that may be sent to the orchestrator
        self.ended = False  # the program sends no more
        self.window, self.owed = WINDOW_BYTES, 0
        self.pending: deque[memoryview] = deque()
        self.waits = False  # for the program to take what is pending
        self.end = 0


class _Streams:
    """The streams of one call."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._lock = threading.Lock()  # of all that follows
        self._changed = threading.Condition(self._lock)
        self._streams: dict[int, _Stream] = {}
        self._by_fd: dict[int, _Stream] = {}
        self._last = 0
        self._room = ROOM_BYTES
        self._outbox: deque[_Frame] = deque()
        self._size = 0
        self._over = False
        self._listeners = {listener.fileno(): (index, listener) for index, listener in enumerate(listeners)}
        self._listening = False
        # Who has something to read, and who takes something again. Both in one, to wait for either.
        self._reads, self._writes, self._both = select.epoll(), select.epoll(), select.epoll()
        self._both.register(self._reads, select.EPOLLIN)
        self._both.register(self._writes, select.EPOLLIN)
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._writes.register(self._bell, select.EPOLLIN)
        self._listen(True)
        self._thread = threading.Thread(target=self._serve, name="relay sockets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """All connections are reset."""
        with self._lock:
            self._over = True
            self._changed.notify_all()
            os.write(self._ring, b"!")
        self._thread.join()
        for stream in list(self._streams.values()):
            self._forget(stream, reset=True)
        for epoll in (self._reads, self._writes, self._both):
            epoll.close()
        os.close(self._bell)
        os.close(self._ring)

    # ------------------------------------------------------------ to the orchestrator

    def requests(self) -> Iterator[pb.RelayRequest]:
        """What gRPC sends, in a thread of its own."""
        while True:
            with self._lock:
                while not self._outbox and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                was_full = self._is_full
                frames: list[_Frame] = []
                size = 0
                while self._outbox and len(frames) < _MESSAGE_FRAMES and size < _MESSAGE_BYTES:
                    frame = self._outbox.popleft()
                    frames.append(frame)
                    size += _size(frame)
                self._size -= size
                if was_full and not self._is_full:
                    os.write(self._ring, b"!")
            request = pb.RelayRequest()
            for number, field, value in frames:
                request.frames.add(stream=number, **{field: value})
            yield request

    @property
    def _is_full(self) -> bool:
        return self._size >= OUTBOX_BYTES

    def _put(self, number: int, field: str, value: Any) -> None:
        frame = (number, field, value)
        self._outbox.append(frame)
        self._size += _size(frame)
        self._changed.notify()

    # ------------------------------------------------------------ from the programs

    def _serve(self) -> None:
        while not self._over:
            (self._writes if self._is_full else self._both).poll()
            with self._lock:
                if self._over:
                    return
                for fd, _ in self._writes.poll(0, _EVENTS):
                    if fd == self._bell:
                        os.read(self._bell, 4096)
                    elif fd in self._by_fd:
                        self._flush(self._by_fd[fd])
                if self._is_full:
                    continue
                for fd, _ in self._reads.poll(0, _EVENTS):
                    if fd in self._listeners:
                        self._accept(*self._listeners[fd])
                    elif fd in self._by_fd:
                        self._read(self._by_fd[fd])

    def _accept(self, index: int, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again; or there are no descriptors left, and some will be
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last += 1
        stream = self._streams[self._last] = self._by_fd[connection.fileno()] = _Stream(self._last, connection)
        self._put(stream.number, "open", index)
        self._reads.register(connection, select.EPOLLIN)
        if len(self._streams) >= MAX_STREAMS:
            self._listen(False)
        self._read(stream)

    def _listen(self, wanted: bool) -> None:
        if wanted is not self._listening:
            self._listening = wanted
            for fd in self._listeners:
                if wanted:
                    self._reads.register(fd, select.EPOLLIN)
                else:
                    self._reads.unregister(fd)

    def _read(self, stream: _Stream) -> None:
        if stream.ended or not stream.credit:  # the news was of an earlier connection with its descriptor
            return
        try:
            data = stream.socket.recv(min(_READ_BYTES, stream.credit))
        except BlockingIOError:
            return
        except OSError:
            self._forget(stream, reset=True)
            self._put(stream.number, "end", pb.STREAM_END_RESET)
            return
        if data:
            stream.credit -= len(data)
            self._put(stream.number, "data", data)
            if not stream.credit:
                self._reads.unregister(stream.socket)
            return
        stream.ended = True
        self._reads.unregister(stream.socket)
        self._put(stream.number, "end", pb.STREAM_END_DATA)
        if stream.end and not stream.pending:
            self._forget(stream)

    # ------------------------------------------------------------ from the orchestrator

    def take(self, response: pb.RelayResponse) -> None:
        """What it sends. Frames of a stream that is gone were under way."""
        with self._lock:
            for frame in response.frames:
                stream = self._streams.get(frame.stream)
                if stream is None:
                    continue
                what = frame.WhichOneof("what")
                if what == "data":
                    stream.pending.append(memoryview(frame.data))
                    if not stream.waits:
                        self._flush(stream)
                elif what == "credit":
                    if not stream.credit and not stream.ended:
                        self._reads.register(stream.socket, select.EPOLLIN)
                    stream.credit += frame.credit
                elif frame.end == pb.STREAM_END_RESET:
                    self._forget(stream, reset=True)
                else:
                    stream.end = frame.end
                    if not stream.waits:
                        self._finish(stream)

    def _flush(self, stream: _Stream) -> None:
        """The program gets what it takes."""
        pending, taken = stream.pending, 0
        try:
            while pending:
                sent = stream.socket.send(pending[0])
                taken += sent
                if sent < len(pending[0]):
                    pending[0] = pending[0][sent:]
                else:
                    pending.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the program has gone
            self._forget(stream, reset=True)
            self._put(stream.number, "end", pb.STREAM_END_RESET)
            return
        if taken and not stream.end:
            self._owe(stream, taken)
        if bool(pending) is not stream.waits:
            stream.waits = bool(pending)
            if stream.waits:
                self._writes.register(stream.socket, select.EPOLLOUT)
            else:
                self._writes.unregister(stream.socket)
        if stream.end and not pending:
            self._finish(stream)

    def _owe(self, stream: _Stream, taken: int) -> None:
        """Gives credit for what the program took."""
        stream.owed += taken
        if stream.owed < stream.window // 2:
            return
        if not stream.pending and stream.window < MAX_WINDOW_BYTES and self._room >= stream.window:
            self._room -= stream.window
            stream.owed += stream.window
            stream.window *= 2
        self._put(stream.number, "credit", stream.owed)
        stream.owed = 0

    def _finish(self, stream: _Stream) -> None:
        """The program has got all there is."""
        if stream.end == pb.STREAM_END_CLOSE or stream.ended:
            self._forget(stream)
            return
        try:
            stream.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._forget(stream, reset=True)
            self._put(stream.number, "end", pb.STREAM_END_RESET)

    def _forget(self, stream: _Stream, *, reset: bool = False) -> None:
        """Closes the connection; the kernel takes it out of what is waited for."""
        if self._streams.pop(stream.number, None) is None:
            return
        del self._by_fd[stream.socket.fileno()]
        self._room += stream.window - WINDOW_BYTES
        stream.pending.clear()
        if reset:
            with suppress(OSError):
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
        stream.socket.close()
        if not self._over and len(self._streams) < MAX_STREAMS:
            self._listen(True)


def _size(frame: _Frame) -> int:
    return _FRAME_BYTES + (len(frame[2]) if frame[1] == "data" else 0)
