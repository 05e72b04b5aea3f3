"""Programs on the far side of sockets: a crowd of waiting sandboxes, and one that floods.

python -m tests.integration.attacks.crowd wait ROUNDS SOCKET...    JSON: seconds each call took; refusals
python -m tests.integration.attacks.crowd flood KIND SOCKET        how often, after FLOOD_S
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.proxy.wire import CONTRACT

QUIET = ("idle", "burn")  # the second uses as much CPU as a flood, and leaves its socket alone
FLOODS = ("calls", "connections", "junk")
FLOOD_S = 4.0
BATCH = 20


async def wait(rounds: int, sockets: list[str]) -> None:
    taken: list[float] = []
    refusals: list[str] = []
    ready = asyncio.Barrier(len(sockets))

    async def one(path: str) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub: Any = pb_grpc.SandboxServiceStub(channel)
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT)):
                pass
            await ready.wait()
            print("ready", flush=True)
            talk = [pb.Message(role=pb.ROLE_SYSTEM, content="x" * 8000)]
            for sequence in range(1, rounds + 1):
                talk.append(pb.Message(role=pb.ROLE_USER, content=f"step {sequence}"))
                request = pb.CompleteRequest(sequence=sequence, kind=pb.COMPLETION_KIND_ACTION, messages=talk)
                started = time.perf_counter()
                try:
                    await stub.Complete(request)
                    await stub.RecordStep(pb.RecordStepRequest(step_number=sequence))
                except grpc.aio.AioRpcError as error:
                    refusals.append(f"{error.code().name}: {error.details()}")
                taken.append(time.perf_counter() - started)

    await asyncio.gather(*map(one, sockets))
    print(json.dumps([taken, refusals]), flush=True)


def flood(kind: str, path: str) -> None:
    """What a sandbox can do that has parked, as often as it can, whether anybody listens or not."""
    until = time.monotonic() + FLOOD_S
    with parked(path) as connection:
        count = calls(connection, until) if kind == "calls" else 0
        while time.monotonic() < until:
            if kind == "idle":
                time.sleep(0.1)
            elif kind != "burn":
                count += hung_up_on(path, bytes(range(256)) * 256 if kind == "junk" else b"")
    print(count, flush=True)


def parked(path: str) -> socket.socket:
    """A connection in HTTP/2 that has asked for an assignment."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
    connection.sendall(a_call("Park", 1, pb.ParkRequest(contract=CONTRACT).SerializeToString()))
    return connection


def calls(connection: socket.socket, until: float) -> int:
    """Calls without waiting for their answers; how many, when the connection has broken or it is `until`."""
    count = 0
    connection.settimeout(0.1)
    while time.monotonic() < until:
        streams = range(2 * count + 3, 2 * count + 3 + 2 * BATCH, 2)
        try:
            connection.sendall(b"".join(a_call("RecordStep", stream, b"") for stream in streams))
            connection.recv(1 << 20)
        except TimeoutError:
            pass
        except OSError:
            break
        count += BATCH
    return count


def hung_up_on(path: str, sent: bytes) -> int:
    """Connects, sends, hangs up. 1: it got in."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(path)
        except OSError:
            return 0
        with suppress(OSError):
            one.sendall(sent)
    return 1


def a_call(method: str, stream: int, message: bytes) -> bytes:
    """A whole request in HTTP/2."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/rollout_api.v1.SandboxService/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return _frame(1, 4, stream, block) + _frame(0, 1, stream, body)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        asyncio.run(wait(int(sys.argv[2]), sys.argv[3:]))
    else:
        flood(sys.argv[2], sys.argv[3])
