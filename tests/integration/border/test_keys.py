"""Keys are put in outside, only there, and what an answer sends back of them is overwritten."""

from __future__ import annotations

import base64
import gzip
import zlib
from dataclasses import replace
from pathlib import Path
from time import process_time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.border.bodies import Bodies
from orchestrator.border.keys import BorderKey, Redaction, read_keys
from orchestrator.errors import ConfigError
from orchestrator.rules.border_keys import KeyEntry, key_entry_of
from orchestrator.rules.egress import Entry
from orchestrator.rules.redact import Secret
from tests.fakes.upstream import Got, answer, upstream
from tests.integration.border.world import NAME, box

VALUE = "sk-live/AbC+dEf=0123456789"
HEADER = BorderKey(KeyEntry(NAME, "env:KEY", header="Authorization", format="Bearer {}"), Secret(VALUE))
QUERY = BorderKey(KeyEntry(NAME, "env:KEY", query="key"), Secret(VALUE))


async def test_a_key_is_put_in_over_tls_to_its_host_alone(tmp_path: Path) -> None:
    async with upstream(lambda got: answer()) as server:
        other = Entry("other.example.org", (server.port, server.tls_port), private=True)
        both = (Entry(NAME, (server.port, server.tls_port), private=True), other)
        bodies = Bodies(tmp_path / "egress", 1 << 20)
        async with box(server, *both, keys=(HEADER, QUERY), bodies=bodies) as at:
            mine = ("authorization: mine", "AUTHORIZATION: again", "Range: bytes=0-3", "Accept-Encoding: gzip")
            assert (await at.get("/p?key=mine&a=1&%6bey=too&KEY=x#".rstrip("#"), *mine)).status == 200
            assert (await at.plain("/p?a=1", "Authorization: mine")).status == 200
            assert (await at.plain("/p", host="other.example.org")).status == 200
    secure, plain, elsewhere = server.got
    assert [value for name, value in secure.headers if name.lower() == "authorization"] == [f"Bearer {VALUE}"]
    assert secure.target == f"/p?a=1&key={quote(VALUE, safe='')}"
    assert (secure.header("range"), secure.header("accept-encoding")) == (None, "identity")
    assert (plain.target, plain.header("authorization")) == ("/p?a=1", "mine")
    assert elsewhere.header("authorization") is None
    first = at.border.crossings[0]
    assert (first.keys, first.target) == (2, "/p?key=mine&a=1&%6bey=too&KEY=x")
    assert VALUE not in repr((at.border.crossings, HEADER, at.border))


@pytest.mark.parametrize("wider", [Entry("*.example.org"), Entry(NAME, of_task=True)])
async def test_a_wider_entry_widens_nothing_that_a_key_may_be_used_for(wider: Entry) -> None:
    async with upstream(lambda got: answer()) as server:
        ports = (server.tls_port,)
        named = Entry(NAME, ports, methods=("GET",), paths=("/v1",), private=True)
        async with box(server, named, replace(wider, ports=ports, private=True), keys=(HEADER,)) as at:
            for method, path in (("GET", "/v1/me"), ("POST", "/v1/me"), ("GET", "/admin")):
                assert (await at.get(path, "Authorization: mine", method=method)).status == 200
    assert [got.header("authorization") for got in server.got] == [f"Bearer {VALUE}", "mine", "mine"]


ECHOES = {
    "as it is": VALUE,
    "with %XX": quote(VALUE, safe=""),
    "with %xx": VALUE.replace("/", "%2f").replace("+", "%2b"),
    "all in %XX": "".join(f"%{ord(c):02X}" for c in VALUE),
    "with %XX twice": quote(quote(VALUE, safe=""), safe=""),
    "as JSON writes it": VALUE.replace("/", "\\/"),
    "as JSON may write it": "".join(f"\\u{ord(c):04X}" for c in VALUE),
    "as HTML writes it": "".join(f"&#{ord(c)};" for c in VALUE),
    "in base64": base64.b64encode(VALUE.encode()).decode(),
    "in base64 behind a name": base64.b64encode(f"user:{VALUE}".encode()).decode(),
    "in base64 of a header": base64.b64encode(f"Bearer {VALUE}\r\n".encode()).decode(),
    "in base64 for URLs": base64.urlsafe_b64encode(f"ab{VALUE}c".encode()).decode(),
    "in hexadecimal": VALUE.encode().hex(),
    "in great hexadecimal": VALUE.encode().hex().upper(),
}


@pytest.mark.parametrize("way", ECHOES)
@pytest.mark.parametrize("split", [0, 1, 7])
async def test_echoes_in_headers_and_bodies_are_overwritten_and_counted(
    way: str, split: int, tmp_path: Path
) -> None:
    echo = ECHOES[way]
    body = f"before {echo} after".encode()

    def answering(got: Got) -> bytes:
        if not split:
            return answer(body, "200 OK", f"X-Echo: a{echo}b", f"Location: https://x/?{echo}")
        pieces = [body[at : at + split] for at in range(0, len(body), split)]
        chunks = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    bodies = Bodies(tmp_path / "egress", 1 << 20)
    async with upstream(answering) as server, box(server, keys=(HEADER,), bodies=bodies) as at:
        got = await at.get()
    assert got.body == b"before " + b"*" * (len(body) - 13) + b" after" or "base64" in way
    assert len(got.body) == len(body)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "egress").iterdir())
    (crossing,) = at.border.crossings
    for text in (got.body, repr(got.headers).encode(), kept, repr(crossing).encode()):
        for whole in (VALUE, echo[5:-5]):
            assert whole.encode() not in text
    assert crossing.redacted == (1 if split else 3)


@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "gzip, identity"])
async def test_a_packed_answer_to_a_request_with_a_key_is_refused(packing: str) -> None:
    packed = gzip.compress(VALUE.encode()) if "gzip" in packing else zlib.compress(VALUE.encode())
    packed_answer = answer(packed, "200 OK", f"Content-Encoding: {packing}")
    async with upstream(lambda got: packed_answer) as server, box(server, keys=(HEADER,)) as at:
        got = await at.get("/", "Accept-Encoding: gzip")
    assert got.status == 502
    assert b"asked not to" in got.body
    assert at.border.crossings[0].refusal


async def test_an_answer_with_a_key_in_its_status_line_is_overwritten() -> None:
    async with upstream(lambda got: answer(b"", f"401 bad {VALUE}")) as server, box(server, keys=(HEADER,)) as at:
        assert VALUE.encode() not in await at.inside(
            f"GET / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\nConnection: close\r\n\r\n".encode()
        )


@pytest.mark.parametrize(
    "echo",
    [
        f"HTTP/1.1 200 OK\r\nX Echo: {VALUE}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\n{VALUE}\r\n\r\n",
        f"{VALUE}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Encoding: {VALUE}\r\nContent-Length: 0\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: {VALUE}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {VALUE}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{VALUE}\r\n",
    ],
)
async def test_what_is_wrong_with_an_answer_is_said_without_the_line_that_has_the_key(echo: str) -> None:
    async with upstream(lambda got: echo.encode()) as server, box(server, keys=(HEADER,)) as at:
        got = await at.inside(
            f"GET / HTTP/1.1\r\nHost: {NAME}:{server.tls_port}\r\nConnection: close\r\n\r\n".encode()
        )
    assert VALUE.encode() not in got
    assert VALUE not in repr(at.border.crossings)
    assert at.border.crossings[0].refusal


@given(st.binary(max_size=300), st.binary(max_size=300), st.lists(st.integers(1, 60), max_size=30))
def test_wherever_an_answer_is_cut_the_key_is_found_and_nothing_else_changes(
    before: bytes, after: bytes, cuts: list[int]
) -> None:
    redaction = Redaction([HEADER])
    data, out = before + VALUE.encode() + after, b""
    rest = data
    for cut in cuts:
        out += redaction.feed(rest[:cut])
        rest = rest[cut:]
    out += redaction.feed(rest) + redaction.end()
    assert out == before + b"*" * len(VALUE) + after
    assert redaction.count == 1


@given(st.binary(max_size=400), st.lists(st.integers(1, 40), max_size=20))
def test_what_has_no_key_passes_as_it_is(data: bytes, cuts: list[int]) -> None:
    redaction, out, rest = Redaction([HEADER]), b"", data
    for cut in cuts:
        out += redaction.feed(rest[:cut])
        rest = rest[cut:]
    assert out + redaction.feed(rest) + redaction.end() == data
    assert redaction.count == 0


def test_a_long_key_makes_no_long_search() -> None:
    long = BorderKey(HEADER.entry, Secret("".join(f"{number:x}." for number in range(400, 600))))  # as a JWT
    begun_s = process_time()
    for data in (b"abcdefgh01234567" * 4096, b"%" * 65536):
        redaction = Redaction((long,))
        assert redaction.feed(data) + redaction.end() == data
    for _ in range(100):
        Redaction((long,))
    assert process_time() - begun_s < 8


def test_a_piece_that_begins_no_key_is_not_held_back() -> None:
    redaction = Redaction([HEADER])
    assert redaction.feed(b"data: an event\n\n") == b"data: an event\n\n"
    assert redaction.feed(b"data: sk-li") == b"data: "
    assert redaction.feed(b"ght\n\n") == b"sk-light\n\n"


@pytest.mark.parametrize(
    ("source", "environment", "why"),
    [
        ("env:KEY", {}, "the variable KEY is not set"),
        ("env:KEY", {"KEY": "  "}, "the variable KEY is not set"),
        ("env:KEY", {"KEY": "short"}, "8 to"),
        ("env:KEY", {"KEY": "two\nlines of it"}, "one line"),
        ("file:/nowhere/key", {}, "No such file"),
        ("file:~nobody-of-this-name/key", {}, "cannot be the path of a file"),
    ],
)
def test_a_missing_key_is_one_line_that_names_its_place_and_no_value(
    source: str, environment: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        read_keys([KeyEntry(NAME, source, header="X-Key")], environment)
    assert "\n" not in str(error.value)
    assert not any(value.strip() and value in str(error.value) for value in environment.values())


def test_keys_are_read_from_files_and_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{VALUE}\n")
    entries = [KeyEntry(NAME, f"file:{tmp_path / 'key'}", query="k"), KeyEntry(NAME, "env:KEY", header="X-Key")]
    assert [key.value.reveal() for key in read_keys(entries, {"KEY": VALUE})] == [VALUE, VALUE]


@pytest.mark.parametrize(
    "raw",
    [
        {"host": NAME, "header": "X-Key"},
        {"host": NAME, "from": "env:KEY"},
        {"host": NAME, "from": "KEY", "header": "X-Key"},
        {"host": NAME, "from": "env:KEY", "header": "X-Key", "query": "key"},
        {"host": NAME, "from": "env:KEY", "header": "Host"},
        {"host": NAME, "from": "env:KEY", "header": "X Key"},
        {"host": NAME, "from": "env:KEY", "header": "X-Key", "format": "Bearer"},
        {"host": NAME, "from": "env:KEY", "header": "X-Key", "format": "a\n{}"},
        {"host": "*.example.org", "from": "env:KEY", "header": "X-Key"},
        {"host": NAME, "from": "env:KEY", "header": "X-Key", "value": "v"},
        "text",
    ],
)
def test_a_bad_entry_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        key_entry_of(raw)


def test_an_entry_is_written_back_as_it_was() -> None:
    raw = {"host": NAME, "from": "env:KEY", "header": "Authorization", "format": "Bearer {}"}
    assert key_entry_of(raw).as_setting() == raw
