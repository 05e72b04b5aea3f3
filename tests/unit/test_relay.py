"""Streams of a sandbox, from outside: ways see ordinary streams of asyncio, and a sandbox that keeps to no rules
takes nothing but its own lease."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.relay import MAX_CARRIED, MAX_STREAMS, Relay
from orchestrator.proxy.stream import MAX_WINDOW_BYTES, WINDOW_BYTES
from orchestrator.types import Listener

Carry = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DATA, CLOSE, RESET = pb.STREAM_END_DATA, pb.STREAM_END_CLOSE, pb.STREAM_END_RESET
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for `x` that it signed itself."""
    file = tmp_path_factory.mktemp("tls") / "x.pem"
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    names = ("-subj", "/CN=x", "-addext", "subjectAltName=DNS:x", "-keyout", f"{file}.key", "-out", str(file))
    subprocess.run(["openssl", *made, *names], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.key").read_bytes())
    return file


class A:
    """A way that carries as a function says."""

    listener = Listener()

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._carry(reader, writer)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(10_000):
        writer.write(piece)
        await writer.drain()


class Box:
    """The sandbox's side of one call. What was served so far, by stream: `data`, `ends`, `credit`."""

    def __init__(self, relay: Relay) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self.data: dict[int, bytearray] = {}
        self.ends: dict[int, int] = {}
        self.credit: dict[int, int] = {}
        self.messages = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.serving = asyncio.create_task(relay.serve(self._sent(), self._write))

    async def _sent(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def _write(self, response: pb.RelayResponse) -> None:
        await self.gate.wait()
        self.messages += 1
        for frame in response.frames:
            match frame.WhichOneof("what"):
                case "data":
                    self.data.setdefault(frame.stream, bytearray()).extend(frame.data)
                case "end":
                    self.ends[frame.stream] = frame.end
                case "credit":
                    self.credit[frame.stream] = self.credit.get(frame.stream, 0) + frame.credit
        self._changed.set()

    def send(self, *frames: pb.Frame) -> None:
        self._messages.put_nowait(pb.RelayRequest(frames=frames).SerializeToString())

    def raw(self, message: bytes) -> None:
        self._messages.put_nowait(message)

    def hang_up(self) -> None:
        self._messages.put_nowait(None)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def opens(*streams: int) -> list[pb.Frame]:
    return [pb.Frame(stream=stream, open=0) for stream in streams]


def data(content: bytes, stream: int = 1) -> pb.Frame:
    return pb.Frame(stream=stream, data=content)


def end(how: Any = DATA, stream: int = 1) -> pb.Frame:
    return pb.Frame(stream=stream, end=how)


def credit(size: int, stream: int = 1) -> pb.Frame:
    return pb.Frame(stream=stream, credit=size)


@asynccontextmanager
async def connected(carry: Carry, budget: int = 1 << 40) -> AsyncIterator[tuple[Box, Relay]]:
    left = [budget]

    def spend(size: int) -> bool:
        left[0] -= size
        return left[0] >= 0

    relay = Relay([A(carry)], spend)
    box = Box(relay)
    try:
        yield box, relay
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await relay.aclose()
            with suppress(ProtocolError):
                await box.serving
    assert not relay._tasks


async def test_both_ends_are_half_closed_each_in_its_turn() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        writer.write_eof()
        writer.write(b"lost")
        got.append(await reader.read())

    got: list[bytes] = []
    async with connected(carry) as (box, _):
        box.send(*opens(1))
        await box.until(lambda: box.ends.get(1) == DATA)
        assert box.data[1] == b"first"
        box.send(data(b"still "), data(b"read"), end())
        async with asyncio.timeout(DEADLINE_S):
            while not got:
                await asyncio.sleep(0)
        assert got == [b"still read"]
        assert box.ends[1] == DATA, "both have ended: nothing more is said"


async def test_what_was_written_comes_before_the_close_and_a_failure_resets() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(3))
        if await reader.read(1) == b"!":
            raise RuntimeError("broken")

    async with connected(carry) as (box, _):
        box.send(*opens(1, 2), data(b"abc."), data(b"abc!", 2))
        await box.until(lambda: len(box.ends) == 2)
        assert (box.ends, box.data[1]) == ({1: CLOSE, 2: RESET}, b"abc")


async def test_a_slow_reader_holds_up_its_own_stream_alone() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int(await reader.readline())
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent[size] = sent.get(size, 0) + (1 << 16)

    sent: dict[int, int] = {}
    async with connected(carry) as (box, _):
        box.send(*opens(1, 2), data(b"%d\n" % (64 << 20)), data(b"%d\n" % (1 << 20), 2))
        await box.until(lambda: len(box.data.get(1, b"")) == len(box.data.get(2, b"")) == WINDOW_BYTES)
        for _ in range(16):
            box.send(credit(1 << 16, 2))
        await box.until(lambda: box.ends.get(2) == CLOSE)
        assert len(box.data[2]) == 1 << 20
        assert len(box.data[1]) == WINDOW_BYTES
        assert sent[64 << 20] <= 5 * WINDOW_BYTES, "its way waits"


async def test_a_way_that_does_not_read_gives_no_credit() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(b"%d" % len(await reader.read()))

    go = asyncio.Event()
    async with connected(carry) as (box, _):
        box.send(*opens(1, 2), data(bytes(WINDOW_BYTES)))
        sent = WINDOW_BYTES
        await box.until(lambda: 1 in box.credit)
        while box.credit.get(1, 0) + WINDOW_BYTES > sent:  # asyncio's own reader takes some of it
            piece = min(1 << 17, box.credit[1] + WINDOW_BYTES - sent)
            box.send(data(bytes(piece)))
            sent += piece
            for _ in range(20):
                await asyncio.sleep(0)
        assert sent <= MAX_WINDOW_BYTES + 4 * WINDOW_BYTES
        go.set()
        box.send(end())
        await box.until(lambda: box.ends.get(1) == CLOSE)
        assert box.data[1] == b"%d" % sent


async def test_a_reset_cancels_what_carries_the_stream() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.set()
            raise

    begun, ended = asyncio.Event(), asyncio.Event()
    async with connected(carry) as (box, _):
        box.send(*opens(1))
        await begun.wait()
        box.send(end(RESET))
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        box.send(data(b"late"), credit(1), end())  # they were under way
        box.send(*opens(2))
        assert not box.serving.done()


async def test_streams_end_with_the_lease_and_when_another_call_takes_the_place() -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(1)
        try:
            await reader.read()
        finally:
            ended.append(1)

    begun, ended = list[int](), list[int]()
    async with connected(carry) as (box, relay):
        box.send(*opens(*range(1, 11)))
        again = Box(relay)
        async with asyncio.timeout(DEADLINE_S):
            await box.serving
            again.send(*opens(1))
            while len(begun) < 1:
                await asyncio.sleep(0)
            await relay.aclose()
            await again.serving
            await relay.serve(again._sent(), again._write)  # it is closed
    assert len(ended) == len(begun) > 0


async def test_a_stream_can_go_on_in_tls(certificate: Path) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"CONNECT\n"
        writer.write(b"OK")
        await writer.drain()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        await writer.start_tls(context)
        while line := await reader.readline():
            writer.write(line.upper() * 1000)
            await writer.drain()

    async with connected(carry) as (box, _):
        box.send(*opens(1), data(b"CONNECT\n"))
        await box.until(lambda: box.data.get(1) == b"OK")
        del box.data[1][:]
        arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = ssl.create_default_context(cafile=certificate).wrap_bio(arriving, leaving, server_hostname="x")

        async def through(act: Callable[[], Any]) -> Any:
            while True:
                try:
                    return act()
                except ssl.SSLWantReadError:
                    if out := leaving.read():
                        box.send(data(out), credit(len(out) * 1000))
                    await box.until(lambda: box.data[1])
                    arriving.write(bytes(box.data[1]))
                    del box.data[1][:]

        await through(client.do_handshake)
        client.write(b"hello\n")
        got = b""
        while len(got) < 6000:
            got += await through(lambda: client.read(1 << 16))
        assert got == b"HELLO\n" * 1000


BROKEN = {
    "never opened": [data(b"x", 7)],
    "opened twice": [*opens(1), *opens(1)],
    "backwards": [*opens(5), *opens(4)],
    "no stream": [pb.Frame(open=0)],
    "no such listener": [pb.Frame(stream=1, open=1)],
    "nothing": [*opens(1), pb.Frame(stream=1)],
    "over credit": [*opens(1), data(bytes(WINDOW_BYTES)), data(b"x")],
    "after the end": [*opens(1), end(), data(b"x")],
    "ended twice": [*opens(1), end(), end()],
    "an unknown end": [*opens(1), end(9)],
    "no end": [*opens(1), pb.Frame(stream=1, end=pb.STREAM_END_UNSPECIFIED)],
    "endless credit": [*opens(1), credit(1 << 31)],
    "a huge frame": [*opens(1), data(bytes(wire.MAX_FRAME_BYTES + 1))],
    "too many frames": [credit(1)] * (wire.MAX_FRAMES + 1),
}


async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("frames", BROKEN.values(), ids=BROKEN)
async def test_what_breaks_the_contract_is_refused_by_name(frames: list[pb.Frame]) -> None:
    async with connected(idle) as (box, relay):
        box.send(*frames)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ProtocolError):
                await box.serving
        await relay.aclose()


async def test_more_streams_than_there_may_be_are_refused() -> None:
    async with connected(idle) as (box, _):
        box.send(*opens(*range(1, MAX_STREAMS + 1)))
        box.send(*opens(MAX_STREAMS + 1))
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ProtocolError, match="more than 128 streams at a time"):
                await box.serving


@pytest.mark.long
async def test_ten_thousand_streams_take_their_time_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened and reset at once, while their ways will not end."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        most = max(most, len(relay._tasks))
        try:
            await reader.read()
        finally:
            await asyncio.sleep(0)

    paused: list[float] = []
    sleep = asyncio.sleep

    async def at_once(delay_s: float) -> None:
        paused.append(delay_s)
        await sleep(0)

    most = 0
    async with connected(carry) as (box, relay):
        monkeypatch.setattr("orchestrator.proxy.relay.asyncio.sleep", at_once)
        for first in range(1, 10_001, 50):
            box.send(*(frame for n in range(first, first + 25) for frame in (*opens(n), end(RESET, n))))
            box.send(*opens(*range(first + 25, first + 50)))
            box.send(*(end(RESET, n) for n in range(first + 25, first + 50)))
        box.send(*opens(10_001))
        box.hang_up()
        async with asyncio.timeout(DEADLINE_S):
            await box.serving
        assert most <= MAX_CARRIED
        assert sum(paused) > 1, "it waits for its turn"


async def test_the_budget_ends_streams_both_ways() -> None:
    async with connected(echo, budget=100_000) as (box, _):
        box.send(*opens(1), data(bytes(60_000)))
        async with asyncio.timeout(DEADLINE_S):
            await box.serving
        assert len(box.data.get(1, b"")) <= 40_000


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=3000), max_size=30),
    credits=st.lists(st.integers(1, 100_000), max_size=10),
    streams=st.integers(1, 5),
)
async def test_all_that_is_sent_comes_back_in_order(pieces: list[bytes], credits: list[int], streams: int) -> None:
    async with connected(echo) as (box, _):
        box.send(*opens(*range(1, streams + 1)))
        for size in credits:
            box.send(*(credit(size, stream) for stream in range(1, streams + 1)))
        for piece in pieces:
            box.send(*(data(piece, stream) for stream in range(1, streams + 1)))
        box.send(*(end(stream=stream) for stream in range(1, streams + 1)))
        allowed = WINDOW_BYTES + sum(credits)
        whole = b"".join(pieces)
        for stream in range(1, streams + 1):
            box.send(credit(max(1, len(whole) - allowed), stream))
        await box.until(lambda: len(box.ends) == streams)
        for stream in range(1, streams + 1):
            assert box.data.get(stream, b"") == whole


FRAMES = st.builds(
    pb.Frame,
    stream=st.integers(0, 6),
) | st.one_of(
    st.builds(pb.Frame, stream=st.integers(0, 6), open=st.integers(0, 1)),
    st.builds(pb.Frame, stream=st.integers(0, 6), data=st.binary(max_size=40_000)),
    st.builds(pb.Frame, stream=st.integers(0, 6), credit=st.integers(0, (1 << 32) - 1)),
    st.builds(pb.Frame, stream=st.integers(0, 6), end=st.integers(0, 4)),
)


@given(frames=st.lists(FRAMES, max_size=40), noise=st.binary(max_size=64))
async def test_any_frames_are_served_or_refused_by_name(frames: list[pb.Frame], noise: bytes) -> None:
    async with connected(echo) as (box, _):
        box.send(*opens(1))
        for frame in frames:
            box.send(frame)
        box.raw(noise)
        box.hang_up()
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ProtocolError):
                await box.serving
