"""The operator's network: a proxy that is a process, TLS with an authority made here, headers, redirects."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.endpoints import openai_root
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import ConnectionFailed
from orchestrator.errors import CompletionError, EnvironmentUnusable, ToolError
from orchestrator.network import CA_VARIABLES
from orchestrator.rules.redact import Secret
from orchestrator.tools.tavily import ServiceFailed, Tavily
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.runs import flags, place, run, write_tasks
from tests.fakes.tavily import FakeTavily
from tests.unit.test_refused_parameters import request

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CANARY = "canary-0123456789"
RIGHT = "Thought.\n<code>\nfinal_answer(0)\n</code>"


@pytest.fixture(autouse=True)
def no_network_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), *CA_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Proxy:
    address: str
    seen: list[str] = field(default_factory=list)


@asynccontextmanager
async def proxying(*arguments: str) -> AsyncIterator[Proxy]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.http_proxy", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    proxy = Proxy((await process.stdout.readline()).decode().strip())

    async def read() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            proxy.seen.append(line.decode().strip())

    reading = asyncio.ensure_future(read())
    try:
        yield proxy
    finally:
        process.kill()
        await process.wait()
        await reading


@asynccontextmanager
async def serving(
    handle: Callable[[web.Request], web.StreamResponse | None] = lambda request: None, tls: Path | None = None
) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A chat endpoint: (its address, its requests). `handle` may answer in its place. `tls`: a folder with a
    certificate for localhost."""
    requests: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        await request.read()
        if (instead := handle(request)) is not None:
            return instead
        if request.path.endswith("/models"):
            return web.json_response({"data": [{"id": "m", "owned_by": "us"}]})
        message = {"role": "assistant", "content": "two"}
        return web.json_response({"choices": [{"finish_reason": "stop", "message": message}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    try:
        yield (f"https://localhost:{port}/v1" if tls else f"http://127.0.0.1:{port}/v1"), requests
    finally:
        await runner.cleanup()


async def asked(endpoint: Endpoint) -> str:
    """What it says, at the start and to a request."""
    completer = await connect(endpoint, None)
    assert isinstance(completer, ChatCompleter)
    try:
        return (await completer.sample(request())).text
    finally:
        await completer.aclose()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority's `ca.pem`, and a certificate of it for localhost."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True)

    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(*made, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=An authority of a test")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,DNS:endpoint.test")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr", *names)
    signed = ("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-copy_extensions", "copy")
    openssl(*signed, "-days", "2", "-out", "server.pem")
    return folder


# ---------------------------------------------------------------- proxies


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_an_endpoint_of_any_name_is_asked_through_the_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (address, _), proxying() as proxy:
        monkeypatch.setenv(variable, proxy.address)
        assert await asked(Endpoint(address, "m")) == "two"
        assert await asked(Endpoint(address.replace("127.0.0.1", "gateway.of.ours.test"), "m")) == "two"
    assert len(proxy.seen) == 6
    assert "http://gateway.of.ours.test" in proxy.seen[-1]


async def test_hosts_that_no_proxy_names_are_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (address, requests), proxying() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.0/8")
        assert await asked(Endpoint(address, "m")) == "two"
    assert proxy.seen == []
    assert len(requests) == 3


async def test_an_encrypted_endpoint_is_asked_through_a_tunnel(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tls=authority) as (address, _), proxying("--user", "me:geheim") as proxy:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
        monkeypatch.setenv("HTTPS_PROXY", proxy.address)
        with pytest.raises(EnvironmentUnusable, match=r"the proxy .* HTTP 407"):
            await asked(Endpoint(address, "m"))
        monkeypatch.setenv("HTTPS_PROXY", proxy.address.replace("//", "//me:geheim@"))
        assert await asked(Endpoint(address.replace("localhost", "endpoint.test"), "m")) == "two"
    assert all(line.startswith("CONNECT ") for line in proxy.seen)


async def test_a_proxy_that_is_not_there_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "socks5://me:geheim@proxy:1080")
    with pytest.raises(EnvironmentUnusable, match=r"SOCKS proxies .*privoxy.*HTTPS_PROXY.*NO_PROXY") as error:
        await asked(Endpoint("http://gateway.test/v1", "m"))
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, Refusal), (407, Refusal), (499, Refusal), (500, ConnectionFailed), (502, ConnectionFailed)],
)
async def test_a_proxy_that_is_out_of_order_may_be_asked_again_and_one_that_refuses_may_not(
    status: int, kind: type[CompletionError], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:geheim@127.0.0.1:{port}")
        client = HttpClient(Endpoint("https://gateway.test/v1", "m"))
        told = rf"the proxy http://\S*127\.0\.0\.1:{port} refuses the connection: HTTP {status}"
        with pytest.raises(kind, match=told) as error:
            await client.post("/v1/chat/completions", {}, timeout_s=10)
        await client.aclose()
    assert [line.split()[:2] for line in seen] == [[b"CONNECT", b"gateway.test:443"]]
    assert "geheim" not in str(error.value)
    if isinstance(error.value, ConnectionFailed):
        assert not error.value.sent


async def test_the_web_tools_are_asked_through_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeTavily() as service, proxying() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
        for no_proxy, through in (("10.0.0.0/8", 1), ("127.0.0.0/8", 1)):
            monkeypatch.setenv("NO_PROXY", no_proxy)
            tools = Tavily(Secret(service.key), base_url=service.url, timeout_s=10, max_calls=1)
            with suppress(ServiceFailed, ToolError):
                await tools.search("cats", 1, 100)
            await tools.aclose()
            assert len(proxy.seen) == through


# ---------------------------------------------------------------- certificates


@pytest.mark.parametrize("variable", CA_VARIABLES)
async def test_an_own_authority_is_believed_by_each_usual_variable(
    variable: str, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tls=authority) as (address, _):
        with pytest.raises(EnvironmentUnusable, match=r"certificate .* not trusted.*SSL_CERT_FILE") as refused:
            await asked(Endpoint(address, "m"))
        assert "wait" not in str(refused.value)
        named = authority / "ca.pem"
        if variable == "SSL_CERT_DIR":
            named = tmp_path
            (tmp_path / "ca.pem").write_bytes((authority / "ca.pem").read_bytes())
            subprocess.run(("openssl", "rehash", str(tmp_path)), check=True)
        monkeypatch.setenv(variable, str(named))
        assert await asked(Endpoint(address, "m")) == "two"
        monkeypatch.setenv(variable, str(tmp_path / "missing.pem"))
        with pytest.raises(EnvironmentUnusable, match=f"{variable}: no certificates can be read"):
            await asked(Endpoint(address, "m"))


# ---------------------------------------------------------------- headers, queries, redirects


async def test_headers_and_a_query_go_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (address, requests):
        azure = address.removesuffix("/v1") + "/openai/deployments/m?api-version=2024-10-21"
        assert await asked(Endpoint(openai_root(azure), "m", headers={"api-key": CANARY})) == "two"
        assert await asked(Endpoint(openai_root(f"{address}?a=1&b=x/y"), "m")) == "two"
    paths = [request.path_qs for request in requests]
    assert paths[1:3] == ["/openai/deployments/m/chat/completions?api-version=2024-10-21"] * 2
    assert paths[3:] == ["/v1/models?a=1&b=x/y", *["/v1/chat/completions?a=1&b=x/y"] * 2]
    assert [request.headers.get("api-key") for request in requests[:3]] == [CANARY] * 3


async def test_a_header_is_in_no_log_no_file_and_no_error() -> None:
    def says(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/models"):
            return None
        return web.json_response({"error": f"who is {request.headers['x-key']}?"}, status=403)

    async with serving(says) as (address, _):
        with pytest.raises(EnvironmentUnusable, match="who is") as refused:
            await asked(Endpoint(address, "m", headers={"X-Key": CANARY}))
        assert CANARY not in str(refused.value)
    with place() as home:
        write_tasks(home / "tasks.jsonl", 1)
        async with ScriptedServer("vllm", always(RIGHT)) as server:
            given = ("--openai.headers", json.dumps({"X-Key": CANARY, "X-Team": "a"}))
            ended = await run(*flags(home, server.base_url), *given, directory=home)
            assert ended.code == 0, ended.stderr
            assert {served.headers["x-key"] for served in server.log.all} == {CANARY}
        written = b"".join(path.read_bytes() for path in (home / "run").rglob("*") if path.is_file())
        assert CANARY.encode() not in written
        assert CANARY not in ended.stdout + ended.stderr
        for wrong in ('{"a b": "c"}', '{"Host": "x"}', '{"a": "b\\r\\nc: d"}', '{"a": 1}', "[]", "x"):
            refused_run = await run(
                *flags(home, "http://127.0.0.1:9/v1"), "--openai.headers", wrong, directory=home
            )
            assert refused_run.code == 2
            assert "openai.headers: must be a JSON object" in refused_run.stderr


def moved(status: int, target: str) -> Callable[[web.Request], web.StreamResponse]:
    return lambda request: web.Response(status=status, headers={"Location": target + request.path_qs})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed_as_it_is_or_told(status: int) -> None:
    async with serving() as (there, requests), serving(moved(status, there.removesuffix("/v1"))) as (address, _):
        if status in (307, 308):
            assert await asked(Endpoint(address, "m")) == "two"
            assert [request.method for request in requests] == ["GET", "POST", "POST"]
        else:
            with pytest.raises(EnvironmentUnusable, match=rf"HTTP {status}: .* set --openai\.base_url") as told:
                await asked(Endpoint(address, "m"))
            assert there in str(told.value)
        requests.clear()
        with pytest.raises(EnvironmentUnusable, match="redirects to"):  # no key goes to another server
            await asked(Endpoint(address, "m", api_key=CANARY))
        with pytest.raises(EnvironmentUnusable, match="redirects to"):
            await asked(Endpoint(address, "m", headers={"api-key": CANARY}))
        with pytest.raises(EnvironmentUnusable, match="redirects to"):
            await asked(Endpoint(f"{address}?api-key={CANARY}", "m"))
        assert requests == []


async def test_a_redirect_within_the_server_keeps_the_key() -> None:
    def slash(request: web.Request) -> web.StreamResponse | None:
        target = request.path + "/"
        return None if request.path.endswith("/") else web.Response(status=307, headers={"Location": target})

    async with serving(slash) as (address, requests):
        endpoint = Endpoint(address, "m", api_key=CANARY)
        completer = ChatCompleter(HttpClient(endpoint))
        assert (await completer.sample(request())).text == "two"
        await completer.aclose()
    assert all(request.headers["Authorization"] == f"Bearer {CANARY}" for request in requests)


async def test_redirects_that_go_round_end() -> None:
    async with serving(lambda request: web.Response(status=308, headers={"Location": request.path})) as (
        address,
        all_,
    ):
        with pytest.raises((EnvironmentUnusable, CompletionError), match="HTTP 308"):
            await asked(Endpoint(address, "m"))
        assert len(all_) == 6


async def test_a_redirect_to_the_encrypted_side_goes_through_its_own_proxy(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    async with serving(tls=authority) as (there, requests), proxying() as plain, proxying() as tunnel:
        target = there.removesuffix("/v1")
        async with serving(moved(308, target)) as (address, _):
            monkeypatch.setenv("HTTP_PROXY", plain.address)
            monkeypatch.setenv("HTTPS_PROXY", tunnel.address)
            assert await asked(Endpoint(address, "m")) == "two"
    assert requests
    assert all("CONNECT" not in line for line in plain.seen)
    assert all(line.startswith("CONNECT ") for line in tunnel.seen)
    assert plain.seen
    assert tunnel.seen
