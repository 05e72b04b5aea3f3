"""Ways around the border, each tried over real sockets: none reaches the outside, and each is on record.

The sandbox has no interface, so there is no DNS, no UDP and no other socket to try: what it has is this proxy.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterable
from time import process_time
from typing import Any

import pytest

from orchestrator.border import messages
from orchestrator.border.client_hello import Hello, read_hello
from orchestrator.border.outside import BorderLimits
from orchestrator.border.reach import Reach
from orchestrator.border.streams import Plain
from orchestrator.rules.egress import Entry, Place, Refused
from tests.fakes.upstream import Upstream, answer, upstream
from tests.integration.border.world import NAME, WAIT_S, Box, Names, box, seen

HERE = "Host: {name}:{port}\r\n"
SAFE = "Host: {name}:{tls}\r\n"


def filled(text: str, server: Upstream) -> bytes:
    return text.format(name=NAME, port=server.port, tls=server.tls_port).encode("latin-1")


ADDRESSES = [  # this machine, written in every way that some resolver reads
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "0177.1",
    "127.0.0.1.",
    "0",
    "0.0.0.0",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "localhost",
    "LOCALHOST.",
    "169.254.169.254",
    "0xa9fea9fe",
    "2852039166",
    "[fe80::1]",
    "[fd00:ec2::254]",
    "metadata.google.internal",
]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("way", ["plain", "connect"])
async def test_no_writing_of_an_address_leads_anywhere(address: str, way: str) -> None:
    async with upstream(lambda got: answer()) as server:
        entries = (Entry("*"), Entry(NAME, (server.port,), private=True))
        async with box(server, *entries) as at:
            if way == "plain":
                data = f"GET http://{address}/ HTTP/1.1\r\nHost: {address}\r\n\r\n"
            else:
                data = f"CONNECT {address}:443 HTTP/1.1\r\nHost: {address}:443\r\n\r\n"
            got = seen(await at.raw(data.encode(), eof=True))
        assert got.status in (400, 403)
        assert got.body.decode().count("\n") == 1
        assert (server.got, at.names.asked) == ([], [])
        (crossing,) = at.border.crossings
        assert crossing.refusal
        assert crossing.status == got.status


NAMES = [
    "[fe80::1%25lo]",
    "[fe80::1%lo]",
    "a%70i.example.org",
    "api.example.org%00.evil.example",
    "api.example.org@evil.example",
    "evil.example#api.example.org",
    "evil.example\\.api.example.org",
    "evil.example/api.example.org",
    "api.example.org.evil.example",
    "evilapi.example.org",
    "api.example.org..",
    ".api.example.org",
    "api..example.org",
    "api\tx.example.org",
    "[api.example.org]",
    "127.0.0.1.nip.example",
    "1.2.3.4.5",
    "256.256.256.256",
    "0x",
    "\u0430pi.example.org",
    "\uff41pi.example.org",
    "api\u3002example.org",
    "",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["plain", "connect"])
async def test_no_name_that_looks_like_the_allowed_one_is_it(name: str, way: str) -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        place = f"{name}:{server.port}"
        data = f"GET http://{place}/ HTTP/1.1\r\n" if way == "plain" else f"CONNECT {place} HTTP/1.1\r\n"
        got = seen(await at.raw(f"{data}Host: {NAME}:{server.port}\r\n\r\n".encode(), eof=True))
        assert got.status in (400, 403), got
        assert (server.got, at.names.asked) == ([], [])


@pytest.mark.parametrize("name", ["API.EXAMPLE.ORG", "api.example.org.", "Api.Example.Org."])
async def test_the_allowed_name_is_itself_in_every_writing_and_goes_out_in_one(name: str) -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        assert (await at.plain(host=name)).status == 200
        reader, writer = await at.tunnel(f"{name}:{server.tls_port}")
        writer.write(f"GET / HTTP/1.1\r\nHost: {name}:{server.tls_port}\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            assert seen(await reader.read()).status == 200
        writer.close()
    assert [got.header("host") for got in server.got] == [f"{NAME}:{server.port}", f"{NAME}:{server.tls_port}"]


SMUGGLED = "GET http://{name}:{port}/smuggled HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"
PLAIN = {
    "content-length and transfer-encoding": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "transfer-encoding and content-length": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Content-Length: 0\r\nContent-Length: 9\r\n\r\n" + SMUGGLED,
    "a list of lengths": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Content-Length: 0, 9\r\n\r\n" + SMUGGLED,
    "a length with a sign": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "Content-Length: +1\r\n\r\nx",
    "a transfer-encoding that is none": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two transfer-encodings": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a folded header": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "X: a\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a space before the colon": "POST http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "lines that end with LF alone": "GET http://{name}:{port}/ HTTP/1.1\nHost: {name}:{port}\n\n",
    "one line that ends with LF alone": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "X: a\nY: b\r\n\r\n",
    "a line that ends with CR alone": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "X: a\rY: b\r\n\r\n",
    "a NUL": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "X: a\0b\r\n\r\n",
    "another host in the header": "GET http://{name}:{port}/ HTTP/1.1\r\nHost: internal.example\r\n\r\n",
    "two hosts": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "Host: internal.example\r\n\r\n",
    "no host": "GET http://{name}:{port}/ HTTP/1.1\r\n\r\n",
    "a path alone": "GET / HTTP/1.1\r\n" + HERE + "\r\n",
    "another scheme": "GET ftp://{name}:{port}/ HTTP/1.1\r\n" + HERE + "\r\n",
    "https in the plain way": "GET https://{name}:{tls}/ HTTP/1.1\r\n" + SAFE + "\r\n",
    "a user in the address": "GET http://{name}:{port}@internal.example/ HTTP/1.1\r\n" + HERE + "\r\n",
    "a fragment": "GET http://{name}:{port}#@internal.example/ HTTP/1.1\r\n" + HERE + "\r\n",
    "a space in the address": "GET http://{name}:{port}/ http://internal.example/ HTTP/1.1\r\n" + HERE + "\r\n",
    "another port": "GET http://{name}:22/ HTTP/1.1\r\nHost: {name}:22\r\n\r\n",
    "no port after the colon": "GET http://{name}:/ HTTP/1.1\r\nHost: {name}\r\n\r\n",
    "a port of six digits": "GET http://{name}:065536/ HTTP/1.1\r\nHost: {name}\r\n\r\n",
    "HTTP/2 with prior knowledge": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": "GET http://{name}:{port}/\r\n\r\n",
    "a protocol behind HTTP": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE
    + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "TRACE": "TRACE http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "\r\n",
    "a method in small letters": "get http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "\r\n",
    "no HTTP": "\x16\x03\x01 senseless \r\n\r\n",
    "a head without end": "GET http://{name}:{port}/ HTTP/1.1\r\nX: " + "a" * 70_000,
    "a head of too many lines": "GET http://{name}:{port}/ HTTP/1.1\r\n" + HERE + "a:b\r\n" * 600 + "\r\n",
    "CONNECT to a metadata address": "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n",
    "CONNECT without a port": "CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n\r\n",
    "CONNECT with a whole address": "CONNECT https://{name}:{tls}/ HTTP/1.1\r\n" + SAFE + "\r\n",
    "CONNECT with another host in the header": "CONNECT {name}:{tls} HTTP/1.1\r\nHost: internal.example\r\n\r\n",
    "CONNECT with a body": "CONNECT {name}:{tls} HTTP/1.1\r\n" + SAFE + "Content-Length: 4\r\n\r\nbody",
    "a proxy inside the proxy": "CONNECT proxy.example:3128 HTTP/1.1\r\nHost: proxy.example:3128\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("way", PLAIN)
async def test_no_plain_request_gets_out_by(way: str) -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        data = await at.raw(filled(PLAIN[way], server), eof=True)
        assert data[9:12] in (b"400", b"403", b"405", b"431", b"501"), data[:300]
        assert data.count(b"\r\nContent-Length: ") == 1  # nothing that follows is read
        assert server.got == []
        (crossing,) = at.border.crossings
        assert crossing.refusal
        assert "\n" not in crossing.refusal


INSIDE = {
    "another host in the header": "GET / HTTP/1.1\r\nHost: internal.example\r\n\r\n",
    "the same host at another port": "GET / HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n",
    "an absolute address": "GET http://internal.example/ HTTP/1.1\r\n" + SAFE + "\r\n",
    "an absolute address of the same host": "GET https://{name}:{tls}/ HTTP/1.1\r\n" + SAFE + "\r\n",
    "a tunnel in the tunnel": "CONNECT internal.example:443 HTTP/1.1\r\nHost: internal.example:443\r\n\r\n",
    "a tunnel to the same host": "CONNECT {name}:{tls} HTTP/1.1\r\n" + SAFE + "\r\n",
    "HTTP/2 with prior knowledge": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a protocol behind HTTP": "GET / HTTP/1.1\r\n" + SAFE + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "CL.TE": "POST / HTTP/1.1\r\n" + SAFE + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + "GET /smuggled HTTP/1.1\r\n" + SAFE + "\r\n",
    "a chunk whose size is none": "POST / HTTP/1.1\r\n" + SAFE + "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "lines that end with LF alone": "GET / HTTP/1.1\nHost: {name}:{tls}\n\n",
}  # fmt: skip


@pytest.mark.parametrize("way", INSIDE)
async def test_no_request_inside_tls_gets_out_by(way: str) -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        data = await at.inside(filled(INSIDE[way], server))
        assert data[9:12] in (b"400", b"403", b"405", b"501"), data[:300]
        assert data.count(b"\r\nContent-Length: ") == 1
        assert [got for got in server.got if got.target != "/"] == []
        assert at.border.crossings[-1].refusal
        assert at.border.crossings[-1].host in (NAME, "")


async def test_an_offer_of_http2_is_not_handed_on() -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        offer = (
            "Connection: Upgrade, HTTP2-Settings, X-Secret",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMAAABk",
            "X-Secret: 1",
        )
        assert (await at.get("/", *offer)).status == 200
        assert not {"upgrade", "http2-settings", "x-secret"} & {name.lower() for name, _ in server.got[0].headers}


async def test_a_client_that_speaks_http2_alone_gets_nowhere() -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        reader, writer = await at.tunnel(alpn=["h2"])
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.read())[9:12] in (b"400", b"405")
        writer.close()
    assert server.got == []


@pytest.mark.parametrize("tls", ["terminate", "tunnel"])
@pytest.mark.parametrize("sni", ["internal.example", "api.example.org.evil.example"])
async def test_sni_must_be_the_name_of_the_tunnel(tls: str, sni: str) -> None:
    async with upstream(lambda got: answer()) as server:
        entry = Entry(NAME, (server.tls_port,), tls=tls, private=True)  # type: ignore[arg-type]
        async with box(server, entry) as at:
            with pytest.raises((ssl.SSLError, OSError)):
                await at.tunnel(sni=sni)
            async with asyncio.timeout(WAIT_S):
                while not at.border.crossings:
                    await asyncio.sleep(0)
        assert server.connections == 0
        assert "SNI" in at.border.crossings[0].refusal


async def test_a_tunnel_without_sni_is_refused_unless_an_address_was_named() -> None:
    async with upstream(lambda got: answer()) as server:
        for host, passes in ((NAME, False), ("127.0.0.1", True)):
            async with box(server, Entry(host, (server.tls_port,), tls="tunnel", private=True)) as at:
                reader, writer = await at.open()
                writer.write(
                    f"CONNECT {host}:{server.tls_port} HTTP/1.1\r\n\r\n".replace(" HTTP", " HTTP").encode()
                )
                head = await reader.read(12)
                assert head == b"HTTP/1.1 400"  # HTTP/1.1 has a Host header
                writer.close()
                reader, writer = await at.open()
                place = f"{host}:{server.tls_port}"
                writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                if passes:
                    await writer.start_tls(context)
                else:
                    with pytest.raises((ssl.SSLError, OSError)):
                        await writer.start_tls(context)
                writer.close()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\xff\xff", b"\x16\x02"]
)
@pytest.mark.parametrize("tls", ["terminate", "tunnel"])
async def test_what_is_not_tls_does_not_go_through_a_tunnel(tls: str, data: bytes) -> None:
    async with upstream(lambda got: answer()) as server:
        entry = Entry(NAME, (server.tls_port, server.port), tls=tls, private=True)  # type: ignore[arg-type]
        async with box(server, entry) as at:
            place = f"{NAME}:{server.port}"
            got = await at.raw(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode() + data, eof=True)
        assert got.partition(b"\r\n\r\n")[2] == bytes((21, 3, 3, 0, 2, 2, 112))
        assert server.connections == 0
        assert at.border.crossings[0].refusal


class _Pieces(Plain):
    """A stream that comes in these."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    async def read(self) -> bytes:
        return next(self._pieces, b"")


async def test_words_of_tls_that_come_in_crumbs_are_looked_at_once() -> None:
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent := ssl.MemoryBIO(), server_hostname=NAME)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = sent.read()[5:]
    crumbs = [bytes((22, 3, 1, 0, 1, byte)) for byte in hello]  # one byte in each record
    whole = b"".join(crumbs)
    assert await read_hello(_Pieces(bytes((byte,)) for byte in whole)) == (whole, Hello(NAME))
    begun_s = process_time()
    with pytest.raises(Refused, match="no end"):
        await read_hello(_Pieces(crumbs[0] for _ in range(6_000)))
    assert process_time() - begun_s < 2


async def test_a_name_that_leads_to_a_private_address_is_refused_after_it_was_resolved() -> None:
    for address in (
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "fd00::1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ):
        names = Names({"rebound.example": [["1.1.1.1", address]]})
        async with upstream(lambda got: answer()) as server:
            async with box(server, Entry("rebound.example", (server.port,)), names=names) as at:
                got = await at.plain(host="rebound.example")
        assert got.status == 403
        assert b'"private": true' in got.body
        assert server.connections == 0


async def test_a_rollout_waits_for_few_names_at_a_time_also_where_it_has_hung_up() -> None:
    """Each holds a thread of all rollouts until the resolver gives up."""

    class Silent(Names):
        answers = asyncio.Event()

        async def resolve(self, host: str, port: int) -> list[Any]:
            self.asked.append(host)
            await self.answers.wait()
            return await super().resolve(host, port)

    names = Silent()
    async with (
        upstream(lambda got: answer()) as server,
        box(server, Entry("*.example", (server.port,), private=True), names=names) as at,
    ):
        for number in range(40):
            _, writer = await at.open()
            place = f"n{number}.example:{server.port}"
            writer.write(f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            if number % 2:
                await asyncio.sleep(0.02)
                writer.transport.abort()
        await asyncio.sleep(0.5)
        assert len(names.asked) == 8
        names.answers.set()
        assert (await at.plain(host="last.example")).status == 200


async def test_a_name_is_resolved_once_and_the_address_that_was_judged_is_the_one_that_is_asked() -> None:
    """Rebinding: the resolver has another answer each time."""
    public, private = ["192.0.2.1"], ["127.0.0.1"]
    names = Names({"rebound.example": [["198.51.100.1"], private, public]})
    async with upstream(lambda got: answer()) as server:
        async with box(
            server, Entry("rebound.example", (server.port,)), names=names, limits=BorderLimits(request_s=0.3)
        ) as at:
            got = await at.plain(host="rebound.example")
        assert got.status in (403, 502, 504)  # documentation addresses are not public, and nobody is there
        assert server.connections == 0
        assert names.asked == ["rebound.example"]


async def test_names_that_nobody_answers_for_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(WAIT_S) and [])
    place, entry = Place("slow.example.org", 80), Entry("*.example.org")
    asked = [asyncio.create_task(Reach().open("http", place, entry, tls=False)) for _ in range(50)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(WAIT_S / 4):
            await asyncio.to_thread(int)
    finally:
        answers.set()
        got = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Refused) for one in got)


async def test_half_closed_streams_get_their_answer() -> None:
    async with upstream(lambda got: answer(b"whole")) as server, box(server) as at:
        place = f"{NAME}:{server.port}"
        data = f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\n\r\n".encode()
        assert seen(await at.raw(data, eof=True)).body == b"whole"


@pytest.mark.parametrize("cut", [1, 20, 60, 120])
async def test_requests_without_end_reach_nobody(cut: int) -> None:
    async with upstream(lambda got: answer()) as server, box(server) as at:
        place = f"{NAME}:{server.port}"
        data = (
            f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nContent-Length: 50\r\nX-Long: {'x' * 90}\r\n\r\n"
        )
        await at.raw(data.encode()[:cut], eof=True)
        assert server.got == []


async def test_a_request_that_comes_byte_by_byte_is_one() -> None:
    async with upstream(lambda got: answer(got.body)) as server, box(server) as at:
        place = f"{NAME}:{server.port}"
        data = (
            f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
        )
        reader, writer = await at.open()
        for byte in data.encode():
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            assert seen(await reader.read(), "POST").body == b"abc"
        writer.close()


async def test_a_reader_that_never_reads_holds_up_itself_alone() -> None:
    size = 32 << 20
    async with upstream(lambda got: answer(b"x" * size if got.target == "/large" else b"small")) as server:
        async with box(server) as at:
            _, writer = await at.open()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            place = f"{NAME}:{server.port}"
            writer.write(f"GET http://{place}/large HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            while not server.got:
                await asyncio.sleep(0)
            assert (await at.plain("/small")).body == b"small"
            assert len((await at.plain("/large")).body) == size
            assert len(at.border.crossings) == 2
            writer.transport.abort()
    slow = next(one for one in at.border.crossings if one.refusal)
    assert slow.received < size


@pytest.mark.parametrize(
    ("entry", "asked"),
    [
        ({"methods": ("GET",)}, ("/", "POST")),
        ({"methods": ("GET",)}, ("/", "DELETE")),
        ({"paths": ("/public",)}, ("/private", "GET")),
        ({"paths": ("/public",)}, ("/publicity", "GET")),
        ({"paths": ("/public",)}, ("/public/../private", "GET")),
        ({"paths": ("/public",)}, ("/public/%2e%2e/private", "GET")),
        ({"paths": ("/public",)}, ("/public/%252e%252e/private", "GET")),
        ({"paths": ("/public",)}, ("/public/..%2fprivate", "GET")),
        ({"paths": ("/public",)}, ("/public%2f..%2fprivate", "GET")),
        ({"paths": ("/public",)}, ("/public/..;/private", "GET")),
        ({"paths": ("/public",)}, ("/public/..\\private", "GET")),
        ({"paths": ("/public",)}, ("//public/", "GET")),
        ({"paths": ("/public",)}, ("/private?/public/", "GET")),
    ],
)
async def test_methods_and_paths_that_are_not_allowed(
    entry: dict[str, tuple[str, ...]], asked: tuple[str, str]
) -> None:
    async with upstream(lambda got: answer()) as server:
        allowed = Entry(NAME, (server.tls_port, server.port), private=True, **entry)  # type: ignore[arg-type]
        async with box(server, allowed) as at:
            assert (await at.get(asked[0], method=asked[1])).status == 403
            assert (await at.plain(asked[0], method=asked[1])).status == 403
            assert (await at.get("/public/x")).status == 200
    assert len(server.got) == 1


async def _one(at: Box) -> bytes:
    return await at.raw(b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n")


@pytest.mark.long
async def test_ten_thousand_streams_take_nothing_from_the_one_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "_IDLE_S", 3600.0)  # of the one, however long the others take here
    limits = BorderLimits(streams=64, requests=2_000)
    async with upstream(lambda got: answer()) as server, box(server, limits=limits) as at:
        reader, writer = await at.tunnel()
        for _ in range(50):
            got = await asyncio.gather(*(_one(at) for _ in range(200)), return_exceptions=True)
            assert {one[9:12] for one in got if isinstance(one, bytes)} <= {b"403", b"429"}
        writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            assert seen(await reader.read()).status in (200, 429)
        writer.close()
        assert len(at.border.crossings) <= 2_001
        assert at.border.journal.left_out > 0


async def test_a_proxy_of_the_operators_is_no_way_in_for_others_names() -> None:
    """What the sandbox says to the proxy of the operator stays behind, as does the proxy's password."""
    async with upstream(lambda got: answer()) as server, box(server) as at:
        await at.plain("/", "Proxy-Authorization: Basic eDp5", "Proxy-Connection: keep-alive", "Via: 1.1 me")
    names = {name.lower() for name, _ in server.got[0].headers}
    assert not names & {"proxy-authorization", "proxy-connection"}
