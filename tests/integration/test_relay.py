"""The runner's side of streams as a process of its own: what programs do to its sockets, and what befalls its
channel."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.proxy.lease import Lease
from orchestrator.proxy.relay import MAX_STREAMS
from orchestrator.proxy.server import SandboxServer
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.outcome import Refused
from orchestrator.types import Listener, World
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan
from tests.fakes.relayed import relayed

DEADLINE_S = 60.0
PIECE = bytes(range(256)) * 1024
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Asked:
    """Does as the first line of a stream says: `send N`, `count` all that comes, `hold` it, `echo`."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener or Listener()
        self.open = 0
        self.most = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            what, _, number = (await reader.readline()).decode().strip().partition(" ")
            if what == "send":
                for _ in range(int(number)):
                    writer.write(PIECE)
                    await writer.drain()
            elif what == "count":
                size = 0
                while piece := await reader.read(1 << 18):
                    size += len(piece)
                writer.write(b"%d" % size)
            elif what == "echo":
                while piece := await reader.read(1 << 18):
                    writer.write(piece)
                    await writer.drain()
            elif what == "hold":
                await asyncio.get_running_loop().create_future()
        finally:
            self.open -= 1


async def asked(port: int, line: bytes) -> Pair:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line + b"\n")
    return reader, writer


async def until(condition: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def facts(pid: int) -> tuple[int, int, int]:
    """(threads, resident KiB, descriptors) of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["Threads"]), int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd"))


async def test_bytes_go_both_ways_and_each_way_ends_by_itself(tmp_path: Path) -> None:
    ways = [Asked(), Asked(Listener("127.0.0.9"))]
    async with relayed(tmp_path, ways) as (box, _), asyncio.timeout(DEADLINE_S):
        assert [host for host, _ in box.addresses] == ["127.0.0.1", "127.0.0.9"]
        port = box.addresses[0][1]
        reader, writer = await asked(port, b"count")
        for _ in range(40):
            writer.write(PIECE)
            await writer.drain()
        writer.write_eof()
        assert await reader.read() == b"%d" % (40 * len(PIECE))
        reader, writer = await asked(port, b"send 100")
        content = bytearray()
        while piece := await reader.read(1 << 20):
            content += piece
        assert content == PIECE * 100
        reader, writer = await asked(port, b"echo")
        writer.write(b"first")
        assert await reader.readexactly(5) == b"first"
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"last"


async def test_connections_beyond_the_limit_wait_and_memory_stays(tmp_path: Path) -> None:
    way = Asked()
    async with relayed(tmp_path, [way]) as (box, lease), asyncio.timeout(DEADLINE_S):
        port = box.addresses[0][1]
        reader, _ = await asked(port, b"send 40")
        await reader.read()
        threads, before, _ = facts(box.pid)
        stuck = [await asked(port, b"send 1000") for _ in range(MAX_STREAMS)]
        for one, _ in stuck:
            one._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: way.open == MAX_STREAMS)
        waiting = asyncio.create_task(asked(port, b"send 1"))
        late, _ = await waiting
        read = asyncio.create_task(late.read())
        await asyncio.sleep(0.5)
        assert way.most == MAX_STREAMS
        assert not read.done()
        for _, one in stuck:
            one.transport.abort()
        assert await read == PIECE
        after = facts(box.pid)
        assert after[0] <= threads + 1
        assert after[1] - before < 64 << 10, "in KiB"
        await until(lambda: way.open == 0)
        assert lease.live


async def test_hostile_programs_hold_up_themselves_alone(tmp_path: Path) -> None:
    way = Asked()
    async with relayed(tmp_path, [way]) as (box, lease), asyncio.timeout(DEADLINE_S):
        port = box.addresses[0][1]

        def flood() -> None:
            for number in range(3000):
                one = socket.socket()
                one.setblocking(False)
                with suppress(BlockingIOError):
                    one.connect(("127.0.0.1", port))
                if number % 3 == 0:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if number % 3 == 1:
                    with suppress(OSError):
                        one.send(b"send 1000\n")
                one.close()

        held_reader, held_writer = await asked(port, b"hold")
        flooding = asyncio.create_task(asyncio.to_thread(flood))
        reader, _ = await asked(port, b"send 20")
        content = bytearray()
        while piece := await reader.read(1 << 20):
            content += piece
        assert content == PIECE * 20
        await flooding
        held_writer.transport.abort()
        reader, _ = await asked(port, b"send 2")
        assert len(await reader.read()) == 2 * len(PIECE)
        assert held_reader.at_eof() or held_reader.exception() is not None
        assert lease.live


async def test_the_budget_ends_the_lease_and_the_listeners(tmp_path: Path) -> None:
    async with relayed(tmp_path, [Asked()], stream_bytes=1 << 20) as (box, lease), asyncio.timeout(DEADLINE_S):
        port = box.addresses[0][1]
        reader, _ = await asked(port, b"send 100")
        with suppress(ConnectionError):
            assert len(await reader.read()) < 1 << 20
        ended = await lease.ended()
        assert ended == Refused("budget", "1048576 bytes through its streams")
        await lease.aclose()

        async def refused() -> None:
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                except ConnectionRefusedError:
                    return
                await asyncio.sleep(0.02)

        await refused()


@pytest.mark.parametrize("how", ["ends", "stays"])
async def test_streams_end_with_the_lease(tmp_path: Path, how: str) -> None:
    way = Asked()
    async with relayed(tmp_path, [way]) as (box, lease), asyncio.timeout(DEADLINE_S):
        port = box.addresses[0][1]
        streams = [await asked(port, b"send 100000" if how == "ends" else b"hold") for _ in range(20)]
        await until(lambda: way.open == 20)
        await lease.aclose()
        assert way.open == 0
        for reader, _ in streams:
            with suppress(ConnectionError):
                while await reader.read(1 << 20):
                    pass


@pytest.mark.parametrize("turns", range(8))
async def test_a_call_ends_though_its_first_message_is_under_way(tmp_path: Path, turns: int) -> None:
    """gRPC sends its initial metadata once. A first message that is cancelled takes them along: then the end of
    the call could not be sent, and the sandbox waited for good."""
    leases: list[Lease] = []
    ending: list[asyncio.Task[None]] = []

    class Ending:
        listener = Listener()

        async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(PIECE)
            for _ in range(turns):  # of the event loop, until the message is under way
                await asyncio.sleep(0)
            ending.append(asyncio.create_task(leases[0].relay.aclose()))

    leases.append(Lease(a_plan(), ScriptedCompleter(["1"]), None, {}, world=World((Ending(),))))
    async with asyncio.timeout(DEADLINE_S), SandboxServer(tmp_path) as server:
        server.assign(leases[0])
        async with grpc.aio.insecure_channel(f"unix:{server.directory}/s") as channel:
            stub = pb_grpc.SandboxServiceStub(channel)
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT)):
                pass
            call = stub.Relay()
            frames = [pb.Frame(stream=1, open=0), pb.Frame(stream=1, credit=1 << 20)]
            await call.write(pb.RelayRequest(frames=frames))
            async for _ in call:
                pass
            assert await call.code() is grpc.StatusCode.OK
        await leases[0].aclose()
