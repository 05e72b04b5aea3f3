"""Programs on the far side of sockets: a crowd of waiting sandboxes, and one that floods.

python -m tests.integration.attacks.crowd wait ROUNDS SOCKET...    JSON: seconds each call took; refusals
python -m tests.integration.attacks.crowd flood KIND SOCKET        how often, when nobody listens any more
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

import grpc
import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.proxy.wire import CONTRACT

FLOODS = ("calls", "connections", "junk")
_LONGEST_S = 4.0
_PATIENCE_S = 0.005


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
    """Connects, sends, hangs up, as often as it can, until the socket is closed to it."""
    sent = {"calls": a_call(), "connections": b"", "junk": bytes(range(256)) * 256}[kind]
    until = time.monotonic() + _LONGEST_S
    count = refused = 0
    while time.monotonic() < until and refused < 100:
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)
                one.sendall(sent)
                if kind == "calls":  # hung up at once, it would not even be seen as a call
                    one.settimeout(_PATIENCE_S)
                    while one.recv(4096):
                        pass
            count += 1
            refused = 0
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            count += 1
        except OSError:
            refused += 1
    print(json.dumps([count, _LONGEST_S - max(0.0, until - time.monotonic())]), flush=True)


def a_call() -> bytes:
    """A whole request for RecordStep in HTTP/2, so that hanging up costs the caller nothing."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/rollout_api.v1.SandboxService/RecordStep",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    return b"".join(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            _frame(4, 0, 0, b""),
            _frame(1, 4, 1, block),
            _frame(0, 1, 1, bytes(5)),
        )
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        asyncio.run(wait(int(sys.argv[2]), sys.argv[3:]))
    else:
        flood(sys.argv[2], sys.argv[3])
