"""Streams out of real sandboxes: through the proxy of `env.egress`, many at a time, and through what breaks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orchestrator.border.authority import Authority
from orchestrator.border.border import Border
from orchestrator.border.keys import BorderKey
from orchestrator.border.outside import Outside
from orchestrator.border.reach import Reach
from orchestrator.host.sandbox import parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.proxy.lease import Lease
from orchestrator.rules.border_keys import KeyEntry
from orchestrator.rules.egress import Entry, Rules, written
from orchestrator.rules.outcome import Submission
from orchestrator.rules.redact import Secret
from orchestrator.types import Listener, SandboxSpec, World
from tests.fakes import oci_images
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_plan, a_sandbox, a_writable_sandbox
from tests.fakes.upstream import answer, upstream
from tests.integration.border.world import NAME, Names

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

DEADLINE_S = 200.0
PIECE = bytes(range(256)) * 4096  # 1 MiB
FETCH = """
import concurrent.futures, hashlib, os, subprocess, sys, threading, time, urllib.request
def get(path, address={address!r}):
    with urllib.request.urlopen(f'http://{{address}}{{path}}', timeout=60) as answer:
        return answer.read()
print(get('/small'), sorted(name for name in os.environ if 'proxy' in name.lower()))
"""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        mebibytes = int(self.path.removeprefix("/mib/")) if self.path.startswith("/mib/") else 0
        body = PIECE if mebibytes else self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) * max(1, mebibytes)))
        self.end_headers()
        for _ in range(max(1, mebibytes)):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server of this machine, under no name that a sandbox has for itself: `/mib/N` has N MiB, other paths
    have themselves."""
    with ThreadingHTTPServer(("127.0.0.2", 0), _Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()


def a_launcher(kind: str, run: str) -> tuple[Launcher, SandboxSpec]:
    if kind == "docker":
        return DockerLauncher(run, max_sandboxes=2, allow_localhost_tcp=True), a_sandbox(DEFAULT_IMAGE)
    if (why := oci_images.why_not()) is not None:
        pytest.skip(why)
    oci_images.stored_image()
    made = OciLauncher(run, max_sandboxes=2, allow_localhost_tcp=True, waived=WAIVED_WITHOUT_ROOT)
    return made, a_writable_sandbox(DEFAULT_IMAGE) if kind == "writable" else a_sandbox(DEFAULT_IMAGE)


@asynccontextmanager
async def assigned(
    kind: str, run: str, world: World, *codes: str
) -> AsyncIterator[tuple[Lease, ScriptedCompleter]]:
    """A sandbox whose agent runs these steps and answers `done`."""
    launcher, spec = a_launcher(kind, run)
    script = [f"Thought.\n<code>\n{code}\n</code>" for code in (*codes, "final_answer('done')")]
    completer = ScriptedCompleter(script)
    try:
        with Channels(run, Path("/tmp")) as channels:
            async with parked_sandbox(spec, launcher, channels.directory) as box, asyncio.timeout(DEADLINE_S):
                lease = Lease(a_plan(sandbox=spec), completer, None, {}, world=world)
                box.server.assign(lease)
                yield lease, completer
    finally:
        await launcher.aclose()


async def observed(kind: str, run: str, world: World, *codes: str) -> list[str]:
    """What the agent was told after each step."""
    async with assigned(kind, run, world, *codes) as (lease, completer):
        ended = await lease.ended()
        assert isinstance(ended, Submission), ended
        assert ended.answer == b"done", ended
    return [request.messages[-1].content for request in completer.requests[1:]]


def proxied(address: str) -> World:
    return World((Border(Rules((written(address, private=True),)), Outside()),))


@pytest.fixture(params=["docker", "oci", "writable"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow
async def test_programs_ask_the_hosts_that_are_named_and_no_others(kind: str, run: str, address: str) -> None:
    world = proxied(address)
    curl = f"curl -sS --max-time 60 http://{address}/curl"
    refused = "curl -sS --max-time 60 -o /dev/null -w '%{http_code}' http://elsewhere.invalid/"
    first, shells, many = await observed(
        kind,
        run,
        world,
        FETCH.format(address=address),
        f"sh = lambda line: print(subprocess.run(line, shell=True, stdout=-1, stderr=-2, text=True).stdout)\n"
        f"import shutil\nprint(shutil.which('curl') and 'has curl')\nsh({curl!r})\nsh({refused!r})\n"
        "try: get('/', 'elsewhere.invalid')\nexcept OSError as error: print(error, error.read())",
        "with concurrent.futures.ThreadPoolExecutor(50) as pool:\n"
        "    print(len(set(pool.map(get, [f'/{n}' for n in range(500)]))))",
    )
    assert "b'/small' ['HTTPS_PROXY', 'HTTP_PROXY', 'NO_PROXY', 'http_proxy', 'https_proxy', 'no_proxy']" in first
    if "has curl" in shells:
        assert "/curl" in shells
        assert "\n403" in shells
    assert (
        "HTTP Error 403: Forbidden b'elsewhere.invalid:80 is not in env.egress: who runs this can add it there\\n'"
        in shells
    )
    assert "\n500\n" in many


async def test_https_is_answered_under_the_authority_of_the_run_and_a_key_is_never_inside(
    kind: str, run: str
) -> None:
    authority = Authority()
    key = BorderKey(KeyEntry(NAME, "env:KEY", header="Authorization"), Secret("the-value-of-a-key"))
    async with upstream(lambda got: answer(f"{got.header('authorization')} {got.target}".encode())) as server:
        entry = Entry(NAME, (server.tls_port,), private=True)
        outside = Outside(Reach(Names().resolve, server.trust), authority.context, keys=(key,))
        border = Border(Rules((entry,)), outside)
        world = World((border,), authority.certificate)
        (told,) = await observed(
            kind,
            run,
            world,
            "import urllib.request, subprocess, shutil\n"
            f"url = 'https://{NAME}:{server.tls_port}/path'\n"
            "print(urllib.request.urlopen(url, timeout=60).read().decode())\n"
            "if shutil.which('curl'): print(subprocess.run(['curl', '-sS', url], stdout=-1, text=True))",
        )
    assert f"{'*' * 18} /path" in told, told
    assert "the-value-of-a-key" not in told
    assert server.got[0].header("authorization") == "the-value-of-a-key"
    assert {one.status for one in border.crossings} == {200}


@pytest.mark.slow
async def test_a_large_download_is_whole_while_a_reader_never_reads(kind: str, run: str, address: str) -> None:
    request = f"GET http://{address}/mib/64 HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
    (told,) = await observed(
        kind,
        run,
        proxied(address),
        FETCH.format(address=address) + "\nimport socket\n"
        "host, port = os.environ['http_proxy'].removeprefix('http://').split(':')\n"
        "stuck = [socket.create_connection((host, int(port))) for _ in range(20)]\n"
        f"for one in stuck: one.sendall({request!r})\n"
        "start = time.monotonic()\ndigest = hashlib.sha256()\n"
        f"with urllib.request.urlopen('http://{address}/mib/200', timeout=60) as answer:\n"
        "    while piece := answer.read(1 << 20): digest.update(piece)\n"
        "print(digest.hexdigest(), time.monotonic() - start)\n"
        "print(len(get('/mib/3')), [int(line.split()[1]) for line in open('/proc/self/status') if 'RSS' in line])",
    )
    assert hashlib.sha256(PIECE * 200).hexdigest() in told, told
    assert str(3 << 20) in told


async def test_streams_go_on_after_a_worker_is_killed(kind: str, run: str, address: str) -> None:
    after = FETCH.format(address=address)
    request = f"GET http://{address}/mib/64 HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
    killed = (
        "import socket, os\nhost, port = os.environ['http_proxy'].removeprefix('http://').split(':')\n"
        "stuck = [socket.create_connection((host, int(port))) for _ in range(300)]\n"
        f"for one in stuck[:50]: one.sendall({request!r})\n"
        "os._exit(3)"
    )
    told = await observed(kind, run, proxied(address), after, killed, after)
    assert "ended with exit code 3" in told[1]
    assert "b'/small'" in told[2]


LOOK = """
import os, ssl, subprocess
file = os.environ['SSL_CERT_FILE']
names = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE', 'GIT_SSL_CAINFO', 'PIP_CERT', 'NODE_EXTRA_CA_CERTS')
print({os.environ[name] for name in names} == {file}, b'of-a-test' in open(file, 'rb').read())
print(open(os.environ['APT_CONFIG']).read() == f'Acquire::https::CaInfo "{file}";\\n')
print(subprocess.run('cat "$SSL_CERT_FILE" | grep -c of-a-test', shell=True, capture_output=True).stdout)
for attempt in (lambda: open(file, 'ab'), lambda: os.unlink(file), lambda: os.chmod(file, 0o666)):
    try: print('could', attempt())
    except OSError as error: print(error.strerror)
"""


async def test_certificates_can_be_read_and_not_changed(kind: str, run: str) -> None:
    (told,) = await observed(kind, run, World(authorities=b"# of-a-test\n"), LOOK)
    assert "True True\nTrue\nb'1\\n'\n" in told, told
    assert "could" not in told


class Endless:
    """A way that sends until it cannot."""

    listener = Listener("127.0.0.7", 7)

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun.set()
        try:
            while True:
                writer.write(PIECE)
                await writer.drain()
        finally:
            self.ended.set()


async def test_streams_end_with_the_lease(kind: str, run: str) -> None:
    way = Endless()
    code = "import socket\none = socket.create_connection(('127.0.0.7', 7))\nwhile one.recv(1 << 16): pass"
    async with assigned(kind, run, World((way,)), code) as (lease, _):
        await way.begun.wait()
        await lease.aclose()
        assert way.ended.is_set()
