"""The network of a dry run: the border with the hosts that the operator names, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.grading.dry_run import Network, network_of
from orchestrator.launch.listeners import serving as serving_way
from tests.fakes.upstream import answer, upstream
from tests.fakes.wheel_index import Index, serving

FILES = {"/one": b"1" * 200_000, "/two": b"2"}


@pytest.fixture
def index() -> Iterator[Index]:
    with serving(FILES) as made:
        yield made


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def served(network: Network) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with serving_way(listener, network):
        yield port


async def raw(port: int, request: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request}\r\n\r\n".encode())
    writer.write_eof()
    async with asyncio.timeout(20):
        got = await reader.read()
    writer.close()
    return got


def get(address: str, path: str) -> str:
    return f"GET http://{address}{path} HTTP/1.1\r\nHost: {address}\r\nProxy-Authorization: Basic x"


async def test_a_named_host_is_asked_by_http_and_through_tls_that_is_its_own() -> None:
    async with upstream(lambda got: answer(b"2"), host="127.0.0.1") as server:
        places = [f"127.0.0.1:{server.port}", f"127.0.0.1:{server.tls_port}"]
        network = network_of(places)
        async with served(network) as port:
            assert (await raw(port, get(places[0], "/two"))).endswith(b"\r\n\r\n2")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT {places[1]} HTTP/1.1\r\nHost: {places[1]}\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await writer.start_tls(server.trust, server_hostname="127.0.0.1")
            writer.write(b"GET /two HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(20):
                assert (await reader.read()).endswith(b"\r\n\r\n2")
            writer.close()
        assert network.reached == tuple(places)
        assert network.refused == ()


@pytest.mark.parametrize(
    ("allowed", "request_", "status"),
    [
        (["pypi.org"], "CONNECT {index} HTTP/1.1\r\nHost: {index}", 403),
        (["127.0.0.1"], "CONNECT {index} HTTP/1.1\r\nHost: {index}", 403),  # at 80 and 443
        (["*"], "CONNECT {index} HTTP/1.1\r\nHost: {index}", 403),
        (["*"], "CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443", 403),
        (["*"], "CONNECT 2130706433:443 HTTP/1.1\r\nHost: 2130706433:443", 403),
        (["*"], "CONNECT pypi.org:22 HTTP/1.1\r\nHost: pypi.org:22", 403),
        (["{index}"], "GET /one HTTP/1.1\r\nHost: {index}", 400),
        (["{index}"], "senseless", 400),
        (["nowhere.invalid"], "GET http://nowhere.invalid/ HTTP/1.1\r\nHost: nowhere.invalid", 502),
    ],
)
async def test_nothing_else_gets_out(allowed: list[str], request_: str, status: int, index: Index) -> None:
    network = network_of([entry.replace("{index}", index.address) for entry in allowed])
    async with served(network) as port:
        got = await raw(port, request_.replace("{index}", index.address))
    assert got.startswith(f"HTTP/1.1 {status} ".encode()), got
    assert index.asked == []
    assert bool(network.refused) == (status == 403)
    assert network.reached == ()
    if network.refused and "{index}" not in request_:
        assert b"is not in env.grader_network" in got


@pytest.mark.parametrize("password", ["pass", "wrong"])
async def test_the_operators_own_proxy_is_on_the_way_and_its_password_stays_here(
    password: str, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.http_proxy", "--user", "name:pass"), stdout=asyncio.subprocess.PIPE
    )
    assert proxy.stdout is not None
    try:
        async with upstream(lambda got: answer(b"2"), host="127.0.0.1") as server:
            async with asyncio.timeout(60):
                address = (await proxy.stdout.readline()).decode().strip().replace("://", f"://name:{password}@")
            for name in ("http_proxy", "https_proxy"):
                monkeypatch.setenv(name, address)
            place = f"127.0.0.1:{server.tls_port}"
            network = network_of([index.address, place])
            assert "name" not in str(network.environment)
            async with served(network) as port:
                plain = await raw(port, get(index.address, "/two"))
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                try:
                    await writer.start_tls(server.trust, server_hostname="127.0.0.1")
                    passed = True
                except OSError:
                    passed = False
                writer.close()
            assert passed == (password == "pass")
            if passed:
                assert plain.endswith(b"\r\n\r\n2")
                assert index.asked == ["/two"]
            else:
                assert plain.startswith(b"HTTP/1.1 407")
                assert "the proxy answers 407" in network.border.crossings[-1].refusal
                assert index.asked == []
    finally:
        proxy.kill()
        await proxy.wait()


async def test_connections_end_with_the_block(index: Index) -> None:
    async with served(network_of([index.address])) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"CONNECT {index.address} HTTP/1.1\r\nHost: {index.address}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()


def test_the_sandbox_own_names_are_not_asked_of_the_proxy_unless_they_are_allowed() -> None:
    assert network_of(["pypi.org"]).environment["no_proxy"] == "localhost,127.0.0.1,::1"
    assert network_of(["127.0.0.1:8080"]).environment["no_proxy"] == "localhost,::1"
