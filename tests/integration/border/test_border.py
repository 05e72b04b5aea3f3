"""What leaves by the border leaves whole, in both directions, over real sockets and real TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from hashlib import sha256
from time import process_time

import h11
import pytest

from orchestrator.border.authority import Authority
from orchestrator.border.outside import BorderLimits
from orchestrator.border.streams import Socket
from orchestrator.host.base import Provision
from orchestrator.host.egress import RunEgress
from orchestrator.launch.listeners import serving
from orchestrator.proxy.lease import Lease
from orchestrator.rules.egress import Entry
from orchestrator.settings.table import EnvSettings
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan
from tests.fakes.upstream import Got, Upstream, answer, upstream
from tests.integration.border.world import NAME, WAIT_S, Names, box, seen


async def test_plain_requests_and_those_inside_tls_are_answered_and_on_record() -> None:
    async with upstream(lambda got: answer(got.target.encode() + got.body, "200 Fine", "X-Kept: 1")) as server:
        async with box(server) as at:
            plain = await at.plain("/one?a=b")
            secure = await at.get("/two", "X-Mine: yes", method="POST", body=b"body")
    assert (plain.status, plain.body, plain.header("x-kept")) == (200, b"/one?a=b", "1")
    assert (secure.status, secure.body) == (200, b"/twobody")
    assert [got.secure for got in server.got] == [False, True]
    assert server.got[0].target == "/one?a=b"
    assert server.got[1].header("x-mine") == "yes"
    assert server.got[1].header("host") == f"{NAME}:{server.tls_port}"
    first, second = at.border.crossings
    assert (first.method, first.scheme, first.target, first.status) == ("GET", "http", "/one?a=b", 200)
    assert (second.method, second.scheme, second.host, second.port) == ("POST", "https", NAME, server.tls_port)
    assert (second.sent, second.received, second.source) == (4, 8, "network")
    assert second.sent_sha256 == sha256(b"body").hexdigest()
    assert second.received_sha256 == sha256(b"/twobody").hexdigest()
    assert ("X-Kept", "1") in second.headers


async def test_requests_follow_each_other_on_one_connection_inside_and_outside() -> None:
    async with upstream(lambda got: answer(got.target.encode())) as server, box(server) as at:
        reader, writer = await at.tunnel()
        host = f"Host: {NAME}:{server.tls_port}\r\n\r\n"
        for path in ("/a", "/b", "/c"):
            writer.write(f"GET {path} HTTP/1.1\r\n{host}".encode())
            async with asyncio.timeout(WAIT_S):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(2) == path.encode()
        writer.close()
        assert (server.connections, len(server.got)) == (1, 3)


async def test_a_connection_that_the_server_closed_in_between_is_made_again() -> None:
    closing = asyncio.Event()

    async with upstream(lambda got: answer(got.target.encode())) as server, box(server) as at:
        serve = server.serve

        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if server.connections == 0:
                head = await reader.readuntil(b"\r\n\r\n")
                server.connections += 1
                writer.write(answer(head.split(b" ")[1]))
                await closing.wait()
                writer.close()
                return
            await serve(reader, writer)

        server.serve = once  # type: ignore[method-assign]
        reader, writer = await at.open()
        place = f"{NAME}:{server.port}"
        for path in ("/a", "/b"):
            writer.write(f"GET http://{place}{path} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(2) == path.encode()
            closing.set()
        writer.close()
        assert server.connections == 2


@pytest.mark.parametrize(
    ("raw", "method", "status", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nETag: 1\r\n\r\n", "GET", 304, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", "HEAD", 200, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "GET", 200, b"ok"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nT: r\r\n\r\n",
            "GET",
            200,
            b"ok",
        ),
        (b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nto the end", "GET", 200, b"to the end"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example/\r\nContent-Length: 0\r\n\r\n",
            "GET",
            302,
            b"",
        ),
        (b"HTTP/1.1 500 Broken\r\nContent-Length: 3\r\n\r\nbad", "GET", 500, b"bad"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "GET", 502, None),
        (b"nonsense\r\n\r\n", "GET", 502, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc", "GET", 502, None),
    ],
)
async def test_answers_of_every_kind(raw: bytes, method: str, status: int, body: bytes | None) -> None:
    async with upstream(lambda got: raw) as server, box(server) as at:
        got = await at.get(method=method)
    assert got.status == status
    assert body is None or got.body == body
    assert at.border.crossings[0].status == status


async def test_a_redirect_is_an_answer_and_the_next_request_is_judged_anew() -> None:
    moved = answer(b"", "302 Found", "Location: http://169.254.169.254/latest")
    async with upstream(lambda got: moved) as server, box(server) as at:
        first = await at.plain("/go")
        assert (first.status, first.header("location")) == (302, "http://169.254.169.254/latest")
        following = seen(
            await at.raw(b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", eof=True)
        )
        assert following.status == 403
    assert len(server.got) == 1


async def test_large_bodies_stream_in_both_directions() -> None:
    size = 8 << 20

    async with upstream(lambda got: answer(got.body)) as server, box(server) as at:
        got = await at.get(method="PUT", body=b"x" * size)
    assert got.body == b"x" * size
    (crossing,) = at.border.crossings
    assert (crossing.sent, crossing.received) == (size, size)


async def test_a_body_in_chunks_goes_out_in_chunks_without_extensions_and_trailers() -> None:
    async with upstream(lambda got: answer(got.body)) as server, box(server) as at:
        place = f"{NAME}:{server.tls_port}"
        head = f"POST / HTTP/1.1\r\nHost: {place}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        got = seen(await at.inside(head.encode() + b"3;evil=1\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"), "POST")
    assert got.body == b"abc"
    assert b"evil" not in server.got[0].head
    assert server.got[0].header("transfer-encoding") == "chunked"


async def test_a_body_in_crumbs_goes_on_in_pieces_and_others_have_their_turn() -> None:
    crumbs, came, busy_s = b"2\r\nab\r\n" * 20_000, bytearray(), 0.0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not came.endswith(b"\r\n0\r\n\r\n"):
            came.extend(await reader.read(1 << 16))
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 103 A\r\n\r\n" * 90 + head + crumbs + b"0\r\n\r\n")

    async def others() -> None:
        nonlocal busy_s
        while True:
            begun_s = process_time()
            await asyncio.sleep(0)
            busy_s = max(busy_s, process_time() - begun_s)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    place = f"{NAME}:{(port := listening.sockets[0].getsockname()[1])}"
    head = f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nTransfer-Encoding: chunked\r\nConnection: close"
    async with box(Upstream(lambda got: b"", Authority(), port, port)) as at:
        other = asyncio.create_task(others())
        got = await at.raw(head.encode() + b"\r\n\r\n" + crumbs + b"0\r\n\r\n")
        other.cancel()
    listening.close()
    assert seen(got).body == b"ab" * 20_000
    assert len(came) < len(crumbs) // 2, "few chunks"
    assert busy_s < 0.1


async def test_who_waits_for_100_continue_gets_it() -> None:
    async with upstream(lambda got: answer(got.body)) as server, box(server) as at:
        reader, writer = await at.tunnel()
        writer.write(f"POST / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\n".encode())
        writer.write(b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(b"abc")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(3) == b"abc"
        writer.close()
    assert server.got[0].header("expect") is None


async def test_an_answer_that_comes_before_the_body_is_handed_on() -> None:
    async with upstream(lambda got: b"") as server, box(server) as at:

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(b"no", "413 Too Large"))
            await reader.read()
            writer.close()

        server.serve = early  # type: ignore[method-assign]
        reader, writer = await at.tunnel()
        head = f"POST / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b"only a part")
        async with asyncio.timeout(WAIT_S):
            assert seen(await reader.read(), "POST").status == 413
        writer.close()


async def test_what_follows_an_answer_that_came_before_the_body_is_no_request() -> None:
    """The rest of the body looks like a request, and nobody reads it as one; nor is the server asked again."""
    async with upstream(lambda got: answer(got.target.encode())) as server, box(server) as at:

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(b"no", "413 Too Large"))
            server.got += [await reader.read()]  # type: ignore[list-item]
            writer.close()

        server.serve = early  # type: ignore[method-assign]
        place = f"{NAME}:{server.port}"
        hidden = f"GET http://{place}/hidden HTTP/1.1\r\nHost: {place}\r\n\r\n".encode()
        reader, writer = await at.open()
        size = f"Content-Length: {len(hidden)}\r\nExpect: 100-continue\r\n\r\n"
        writer.write(f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\n{size}".encode())
        async with asyncio.timeout(WAIT_S):
            assert b" 413 " in await reader.readuntil(b"\r\n\r\nno")
            writer.write(hidden + hidden)
            assert await reader.read() == b""
        writer.close()
    assert server.connections == 1
    assert [crossing.target for crossing in at.border.crossings] == ["/"]


async def test_an_answer_without_length_is_not_whole_when_the_sandbox_breaks_off_its_request() -> None:
    async with upstream(lambda got: b"") as server, box(server) as at:

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nthe first half")
            await reader.read()
            writer.close()

        server.serve = early  # type: ignore[method-assign]
        place = f"{NAME}:{server.port}"
        reader, writer = await at.open()
        head = f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"half\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"nonsense\r\n")
            assert await reader.read() == b""
        writer.close()
    (crossing,) = at.border.crossings
    assert "its length" in crossing.refusal
    assert crossing.received_sha256 is None


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200\nContent-Length: 2\n\nok", b"ok"),
        (b"HTTP/1.1 200 OK\nSet-Cookie: a=b;\n  c\nConnection: close\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: CHUNKED\r\n\r\n0A;x\r\n0123456789\r\n00\r\n\r\n", b"0123456789"),
    ],
)
async def test_odd_servers_are_understood(raw: bytes, body: bytes) -> None:
    async with upstream(lambda got: raw) as server, box(server) as at:
        got = await at.get()
    assert (got.status, got.body) == (200, body)


async def test_a_certificate_that_is_not_the_hosts_is_not_believed() -> None:
    async with upstream(lambda got: answer(), host="other.example.org") as server, box(server) as at:
        got = await at.get()
    assert got.status == 502
    assert b"cannot be believed" in got.body
    assert server.got == []


async def test_a_tunnel_is_opaque_and_its_bytes_are_counted() -> None:
    async with upstream(lambda got: answer(b"through")) as server:
        entry = Entry(NAME, (server.tls_port,), tls="tunnel", private=True)
        async with box(server, entry) as at:
            reader, writer = await at.open()
            place = f"{NAME}:{server.tls_port}"
            writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            await writer.start_tls(server.trust, server_hostname=NAME)  # the server's own certificate
            writer.write(f"GET / HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode())
            async with asyncio.timeout(WAIT_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
    (crossing,) = at.border.crossings
    assert (crossing.method, crossing.scheme, crossing.status, crossing.host) == ("CONNECT", "tunnel", 200, NAME)
    assert crossing.sent > 500
    assert crossing.received > 500
    assert crossing.received_sha256 is None


async def test_the_servers_silence_ends_with_the_time_of_one_request() -> None:
    silent = asyncio.Event()

    async def never(got: Got) -> bytes:
        await silent.wait()
        return b""

    async with upstream(never) as server, box(server, limits=BorderLimits(request_s=0.3)) as at:
        assert (await at.plain()).status == 504


async def test_an_answer_that_breaks_off_breaks_off_inside_too() -> None:
    raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\nhalf"
    async with upstream(lambda got: raw) as server, box(server) as at:
        data = await at.raw(
            f"GET http://{NAME}:{server.port}/ HTTP/1.1\r\nHost: {NAME}:{server.port}\r\n\r\n".encode()
        )
    assert data.endswith(b"half")
    (crossing,) = at.border.crossings
    assert "broke off" in crossing.refusal
    assert crossing.received_sha256 is None


@pytest.mark.parametrize(
    ("limits", "status"),
    [(BorderLimits(requests=2), 429), (BorderLimits(size=3_000), 429)],
)
async def test_over_a_limit_requests_are_answered_so(limits: BorderLimits, status: int) -> None:
    async with upstream(lambda got: answer(b"x" * 1_000)) as server, box(server, limits=limits) as at:
        statuses = []
        for _ in range(5):
            try:
                statuses.append((await at.plain()).status)
            except (AssertionError, OSError, h11.RemoteProtocolError):
                statuses.append(0)  # broke off in its body
    assert statuses[:2] == [200, 200]
    assert statuses[-1] == status
    assert "limit of one rollout" in at.border.crossings[-1].refusal
    assert len(server.got) <= 3


async def test_streams_over_the_limit_are_told_so_and_the_others_go_on() -> None:
    async with upstream(lambda got: answer()) as server, box(server, limits=BorderLimits(streams=3)) as at:
        held = [await at.open() for _ in range(3)]
        for _, writer in held:
            writer.write(b"GET http")
        assert (await at.raw(b"")).startswith(b"HTTP/1.1 429")
        place = f"{NAME}:{server.port}"
        reader, writer = held[0]
        writer.write(f"://{place}/ HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()


async def test_what_the_sandbox_gives_up_is_on_record_with_a_reason() -> None:
    silent, asked = asyncio.Event(), asyncio.Event()

    async def never(got: Got) -> bytes:
        asked.set()
        await silent.wait()
        return b""

    async with upstream(never) as server, box(server) as at:
        _, writer = await at.tunnel()
        writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
    writer.close()
    (crossing,) = at.border.crossings  # with the block, as with a lease, its streams are cancelled
    assert (crossing.status, crossing.refusal) == (None, "the sandbox ended it")


async def test_an_opened_tunnel_counts_as_the_requests_inside_it() -> None:
    async with upstream(lambda got: answer()) as server, box(server, limits=BorderLimits(requests=3)) as at:
        assert [(await at.get()).status for _ in range(3)] == [200, 200, 200]
        with pytest.raises(OSError, match="limit of one rollout"):
            await at.get()


async def test_names_are_asked_outside_once_per_connection() -> None:
    names = Names()
    async with upstream(lambda got: answer()) as server, box(server, names=names) as at:
        await at.plain()
    assert names.asked == [NAME]


@pytest.mark.parametrize("body", [b"", b"body"])
@pytest.mark.parametrize("hangs_up", ["while it is idle", "when it is asked"])
async def test_a_post_on_a_connection_that_was_closed_meanwhile_reaches_the_host_once(
    body: bytes, hangs_up: str
) -> None:
    posts, gone = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        for _ in range(1 if "idle" in hangs_up else 2):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(body))
            posts += 1
            if posts != 2 or "idle" in hangs_up:
                writer.write(answer())
        writer.close()
        gone.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    post = f"POST http://{NAME}:{port}/ HTTP/1.1\r\nHost: {NAME}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with listening, box(Upstream(lambda got: b"", Authority(), port, port)) as at, asyncio.timeout(WAIT_S):
        reader, writer = await at.open()
        lines = []
        for _ in range(2):
            writer.write(post.encode() + body)
            lines.append(await reader.readline())
            while (await reader.readline()).strip():
                pass
            await reader.readexactly(5 if b"200" in lines[-1] else 1)
            if "idle" in hangs_up:
                await gone.wait()
                await asyncio.sleep(0.1)  # until that is known here
        writer.close()
    assert posts == 2
    second = b"200" if "idle" in hangs_up else b"502"
    assert [line.split()[1] for line in lines] == [b"200", second]


async def test_a_post_over_tls_that_ended_with_the_last_answer_gets_a_connection_of_its_own() -> None:
    posts = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls, got = authority.context(NAME).wrap_bio(came, goes, server_side=True), b""
        while not got.endswith(b"hi"):
            try:
                got += tls.read()  # with the handshake before it
            except ssl.SSLWantReadError:
                writer.write(goes.read())
                came.write(await reader.read(1 << 16))
        posts += 1
        tls.write(answer())
        with suppress(ssl.SSLWantReadError):
            tls.unwrap()
        writer.write(goes.read())  # the answer and the goodbye in one packet

    authority = Authority()
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with box(Upstream(lambda got: b"", authority, port, port)) as at, asyncio.timeout(WAIT_S):
        reader, writer = await at.tunnel()
        for _ in range(2):
            writer.write(f"POST / HTTP/1.1\r\nHost: {NAME}:{port}\r\nContent-Length: 2\r\n\r\nhi".encode())
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
        writer.close()
    listening.close()
    assert posts == 2


async def test_heads_of_answers_count_and_those_of_answers_before_them() -> None:
    long = f"X-Long: {'x' * 1000}\r\n\r\n"
    early = f"HTTP/1.1 103 Early Hints\r\n{long}".encode() * 1000

    async def answering(got: Got) -> bytes:
        return early if got.target == "/early" else f"HTTP/1.1 204 No Content\r\n{long}".encode()

    async with upstream(answering) as server:
        async with box(server, limits=BorderLimits(size=5_000)) as at:
            statuses = [(await at.plain("/late")).status for _ in range(5)]
        async with box(server, limits=BorderLimits(size=5_000)) as at:
            assert (await at.plain("/early")).status == 429
    assert (statuses[:3], statuses[-1]) == ([204] * 3, 429)


async def test_header_values_beyond_ascii_pass_both_ways_as_they_are() -> None:
    name = 'attachment; filename="\u00e9\u00ff.txt"'
    head = f"HTTP/1.1 200 \u00dcbrig\r\nContent-Disposition: {name}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    request = "GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nX-Name: \u00e9\r\nConnection: close\r\n\r\n"
    heads = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(head)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, box(Upstream(lambda got: b"", Authority(), port, port)) as at:
        got = await at.raw(request.format(f"{NAME}:{port}").encode("latin-1"))
    assert b"X-Name: \xe9\r\n" in heads[0]
    assert got.startswith(head.removesuffix(b"\r\n"))
    assert at.border.crossings[0].headers[0] == ("Content-Disposition", name)


async def test_tunnels_in_which_nothing_is_asked_count() -> None:
    async with upstream(lambda got: answer()) as server, box(server, limits=BorderLimits(requests=3)) as at:
        for _ in range(3):
            (await at.tunnel())[1].close()
        with pytest.raises(OSError, match="limit of one rollout"):
            await at.tunnel()


async def test_a_closed_connection_is_gone_though_its_server_never_reads_and_one_that_ends_has_sent_all() -> None:
    made = asyncio.Queue[asyncio.StreamReader]()
    server = await asyncio.start_server(lambda reader, _: made.put_nowait(reader), "127.0.0.1", 0, limit=1)
    for ends in (False, True):
        there = await Socket.connect("127.0.0.1", server.sockets[0].getsockname()[1])
        reader, data = await made.get(), bytes(16 << 20)  # more than the kernel takes
        writing = asyncio.create_task(there.write(data))
        async with asyncio.timeout(WAIT_S):
            if ends:
                ending = asyncio.create_task(there.end())
                assert await reader.readexactly(len(data)) == data
                await ending
                there.close()
                assert await reader.read() == b""
            else:
                await asyncio.sleep(0)
                there.close()
                assert await there.read() == b""
            await asyncio.wait([writing])
            assert isinstance(writing.exception(), OSError) is not ends
    server.close()


async def test_of_a_server_that_sends_in_crumbs_few_wait_to_be_read_in_one_turn() -> None:
    crumbs = 2_000

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(crumbs):
            writer.write(b"x")
            for _ in range(3):  # turns, in which the other side receives it
                await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server, asyncio.timeout(WAIT_S):
        here = await Socket.connect(*server.sockets[0].getsockname())
        await asyncio.sleep(1)
        turns = size = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        number = 0
        while data := await here.read():
            size, number = size + len(data), number + 1
        task.cancel()
        here.close()
    assert size == crumbs
    assert turns > 0
    assert number < crumbs // 2, "the kernel held most of them together"


async def test_of_a_server_that_sends_without_end_no_more_is_held_than_is_read() -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(OSError):
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()
                sent += 1

    async with await asyncio.start_server(pour, "127.0.0.1", 0) as server, asyncio.timeout(WAIT_S):
        here = await Socket.connect(*server.sockets[0].getsockname())
        seen = -1
        while seen < sent < 100:  # until it stands still; what the kernel holds is less than 100 MiB
            seen = sent
            await asyncio.sleep(0.5)
        assert sent < 100
        taken = 0
        while taken < 200 << 20:
            taken += len(await here.read())
        here.close()


async def test_requests_have_the_times_of_a_rollout_that_goes_on() -> None:
    """An hour may have passed since it was lost: its own clock stood."""
    env = EnvSettings(egress="a.example")  # type: ignore[arg-type]
    async with RunEgress(env).opened(a_plan(), Provision()) as world:
        lease = Lease(a_plan(), ScriptedCompleter(["1"]), None, {}, world=world)
        lease.clock.start()
        lease.clock.go_on(3600.0, 1.0, 0.0)
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(listener, world.ways[0]):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET http://b.example/ HTTP/1.1\r\nHost: b.example\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 403")
            writer.close()
        (crossing,) = world.crossings()
        assert 3600.0 <= crossing.started_s <= crossing.ended_s <= lease.clock.elapsed_s
        await lease.aclose()
