"""While a sandbox is connected its socket is shut; when the connection is lost it is opened again."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.proxy import door
from orchestrator.proxy.door import LOOK_S, Door
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.server import SandboxServer
from orchestrator.proxy.wire import CONTRACT
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan
from tests.fakes.unprivileged import without_override

_CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def newcomer(path: Path) -> str:
    """The last line of somebody who only connects; empty: it got in."""
    program = await asyncio.create_subprocess_exec(
        *without_override(),
        *(sys.executable, "-c", _CONNECT, str(path)),
        stderr=asyncio.subprocess.PIPE,
    )
    return (await program.communicate())[1].decode().strip().rpartition("\n")[2]


async def test_nobody_connects_beside_a_sandbox_that_has_parked(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with SandboxServer(tmp_path) as server:
        assert await newcomer(path) == ""
        channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OWN_CONNECTION)
        given = Lease(a_plan(), ScriptedCompleter(["x"]), None, {})
        server.assign(given)
        async for _ in pb_grpc.SandboxServiceStub(channel).Park(pb.ParkRequest(contract=CONTRACT)):
            pass
        for _ in range(3):  # looked after, it stays shut
            assert "Permission denied" in await newcomer(path)
            await asyncio.sleep(LOOK_S)
        await pb_grpc.SandboxServiceStub(channel).RecordStep(pb.RecordStepRequest(step_number=1))

        await channel.close()  # as if a frozen sandbox had missed its pings
        again = grpc.aio.insecure_channel(f"unix:{path}", options=_OWN_CONNECTION)
        await again.channel_ready()  # root in this test needs no door; only the call below tells that it counts
        await pb_grpc.SandboxServiceStub(again).RecordStep(pb.RecordStepRequest(step_number=2))
        assert [step.step_number for step in given.steps] == [1, 2]
        await again.close()


async def test_a_lost_connection_opens_the_door_until_somebody_is_connected(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def mode(wanted: int) -> None:
        while path.stat().st_mode & 0o777 != wanted:
            await asyncio.sleep(0.02)

    async with asyncio.timeout(60), SandboxServer(tmp_path) as server:
        server.assign(Lease(a_plan(), ScriptedCompleter(["x"]), None, {}))
        channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OWN_CONNECTION)
        async for _ in pb_grpc.SandboxServiceStub(channel).Park(pb.ParkRequest(contract=CONTRACT)):
            pass
        for _ in range(3):
            assert path.stat().st_mode & 0o777 == 0
            await channel.close()
            await mode(0o666)
            assert await newcomer(path) == ""
            channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OWN_CONNECTION)
            await channel.channel_ready()
            await mode(0)
            assert "Permission denied" in await newcomer(path)
        await channel.close()


async def test_a_door_that_is_shut_again_is_watched_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.touch()
    twice = Door(path)
    twice.open()
    before = asyncio.all_tasks()
    twice.shut()
    path.chmod(0o666)  # as when the connection is lost, and the sandbox parks again
    twice.shut()
    assert len(asyncio.all_tasks() - before) == 1
    assert path.stat().st_mode & 0o777 == 0o666, "who watches it decides"
    await twice.aclose()
    assert asyncio.all_tasks() == before


def test_one_look_serves_all_doors_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[frozenset[str]] = []
    now_s = 100.0

    def look() -> frozenset[str]:
        looks.append(frozenset({str(len(looks))}))
        return looks[-1]

    monkeypatch.setattr(door, "_look", look)
    monkeypatch.setattr("orchestrator.proxy.door.time.monotonic", lambda: now_s)
    connections = door._Connections()
    assert connections.paths(0.5) == {"0"}
    now_s = 100.5
    assert connections.paths(0.5) == {"0"}
    assert connections.paths(0.25) == {"1"}
    now_s = 101.25
    assert connections.paths(0.5) == {"2"}
    assert len(looks) == 3


def test_only_connections_are_found_and_none_is_closed(tmp_path: Path) -> None:
    listening, bound, inet = str(tmp_path / "listening"), str(tmp_path / "bound"), socket.socket()
    with inet, socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as other:
        server.bind(listening)
        other.bind(bound)
        server.listen()
        assert listening not in door._look(), "it only listens"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listening)
            with server.accept()[0] as accepted:
                assert {listening, bound} <= door._look()
                client.send(b"x")
                assert accepted.recv(1) == b"x"
        assert listening not in door._look()


@pytest.mark.parametrize("hops", range(6))
async def test_a_cancel_in_the_start_of_a_server_is_a_cancel_and_nothing_else(tmp_path: Path, hops: int) -> None:
    """As when a sandbox that is made ahead is not needed any more."""
    server = SandboxServer(tmp_path)
    starting = asyncio.create_task(server.__aenter__())
    for _ in range(hops):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
