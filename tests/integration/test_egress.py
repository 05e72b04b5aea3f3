"""The proxy by which a dry run asks the hosts it may ask, over real sockets: and that nothing gets past it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.launch.egress import Egress
from tests.fakes.wheel_index import Index, serving

FILES = {"/one": b"1" * 200_000, "/two": b"2"}


@pytest.fixture
def index() -> Iterator[Index]:
    with serving(FILES) as made:
        yield made


@asynccontextmanager
async def served(egress: Egress) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with egress.serving(listener):
        yield port


async def said(port: int, *requests: str) -> bytes:
    """The answer to all of these, sent at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("".join(f"{request}\r\n\r\n" for request in requests).encode())
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def get(address: str) -> str:
    return f"GET http://{address} HTTP/1.1\r\nHost: elsewhere.invalid\r\nProxy-Authorization: Basic x"


async def test_a_named_host_is_asked_and_a_second_request_gets_nowhere(index: Index) -> None:
    egress = Egress([index.address])
    async with served(egress) as port:
        answer = await said(port, get(f"{index.address}/one"), get(f"{index.address}/two"))
        assert answer.startswith(b"HTTP/1.0 200")
        assert answer.endswith(b"\r\n\r\n" + FILES["/one"])
        through = await said(port, f"CONNECT {index.address} HTTP/1.1", "GET /two HTTP/1.0")
        assert through.startswith(b"HTTP/1.1 200")
        assert through.endswith(b"2")
    assert index.asked == ["/one", "/two"]
    assert (egress.reached, egress.refused) == ((index.address,), ())


@pytest.mark.parametrize(
    ("allowed", "request_", "status"),
    [
        (["pypi.org"], "CONNECT {index} HTTP/1.1", 403),
        (["127.0.0.1"], "CONNECT {index} HTTP/1.1", 403),  # at 80 and 443
        (["*"], "CONNECT {index} HTTP/1.1", 403),
        (["*"], "CONNECT localhost:443 HTTP/1.1", 403),
        (["*"], "CONNECT 2130706433:443 HTTP/1.1", 403),
        (["*"], "CONNECT 169.254.169.254:80 HTTP/1.1", 403),
        (["*"], "CONNECT [::ffff:127.0.0.1]:443 HTTP/1.1", 403),
        (["*"], "CONNECT pypi.org:22 HTTP/1.1", 403),
        (["{index}"], "POST http://{index}/one HTTP/1.1", 405),
        (["{index}"], "GET ftp://{index}/one HTTP/1.1", 400),
        (["{index}"], "GET /one HTTP/1.1", 400),
        (["{index}"], "CONNECT {index}@pypi.org HTTP/1.1", 400),
        (["{index}"], "CONNECT 127.0.0.1:99999 HTTP/1.1", 400),
        (["{index}"], "senseless", 400),
        (["nowhere.invalid"], "CONNECT nowhere.invalid:443 HTTP/1.1", 502),
    ],
)
async def test_nothing_else_gets_out(
    allowed: list[str], request_: str, status: int, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    egress = Egress([entry.replace("{index}", index.address) for entry in allowed])
    async with served(egress) as port:
        answer = await said(port, request_.replace("{index}", index.address))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert index.asked == []
    assert bool(egress.refused) == (status == 403)
    assert egress.reached == ()


async def test_a_name_of_this_machine_is_no_public_host_whatever_it_is_called(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    async def here(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 443))]

    egress = Egress(["*"])
    async with served(egress) as port:
        sending = asyncio.create_task(said(port, "CONNECT rebound.example:443 HTTP/1.1"))
        monkeypatch.setattr(loop, "getaddrinfo", here)
        assert (await sending).startswith(b"HTTP/1.1 403 ")
    assert egress.refused == ("rebound.example",)


@pytest.mark.parametrize("password", ["pass", "wrong"])
async def test_the_operators_own_proxy_is_on_the_way_and_its_password_stays_here(
    password: str, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.http_proxy", "--user", "name:pass"), stdout=asyncio.subprocess.PIPE
    )
    assert proxy.stdout is not None
    try:
        async with asyncio.timeout(60):
            address = (await proxy.stdout.readline()).decode().strip().replace("://", f"://name:{password}@")
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        egress = Egress([index.address])
        assert "name" not in str(egress.environment)
        async with served(egress) as port:
            plain = await said(port, get(f"{index.address}/two"))
            tunnel = await said(port, f"CONNECT {index.address} HTTP/1.1", "GET /two HTTP/1.0")
        if password == "pass":
            assert (plain[-1:], tunnel[-1:]) == (b"2", b"2")
            assert index.asked == ["/two", "/two"]
        else:
            assert plain.startswith(b"HTTP/1.1 407")
            assert tunnel.startswith(b"HTTP/1.1 502")
            assert b"the proxy answers 407" in tunnel
            assert index.asked == []
    finally:
        proxy.kill()
        await proxy.wait()


async def test_connections_end_with_the_block(index: Index) -> None:
    egress = Egress([index.address])
    async with served(egress) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"CONNECT {index.address} HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()


def test_the_sandbox_own_names_are_not_asked_of_the_proxy_unless_they_are_allowed() -> None:
    assert Egress(["pypi.org"]).environment["no_proxy"] == "localhost,127.0.0.1,::1"
    assert Egress(["127.0.0.1:8080"]).environment["no_proxy"] == "localhost,::1"
