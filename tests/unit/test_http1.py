"""What the border reads and writes as HTTP/1.1: nothing that h11 would refuse or read as something else, and the
same however it is split. What servers may say in odd ways is read; what a sandbox may not say is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from time import process_time
from typing import Any, NamedTuple

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.border.http1 import (
    Framing,
    Headers,
    Length,
    pieces,
    request_line,
    request_of,
    status_line,
    written,
)
from orchestrator.border.messages import Answer, Sending, framing, handed_on, read_request
from orchestrator.rules.egress import Refused

FRAMED = ("content-length", "transfer-encoding")
REQUEST = b"POST http://a.example/x?y HTTP/1.1\r\nHost: a.example\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\n"


class Stream:
    """A connection whose bytes come in these pieces, and then end."""

    def __init__(self, *come: bytes) -> None:
        self._left = [piece for piece in come if piece]
        self.wrote = b""

    async def read(self) -> bytes:
        return self._left.pop(0) if self._left else b""

    async def write(self, data: bytes) -> None:
        self.wrote += data

    async def end(self) -> None: ...

    def unread(self, data: bytes) -> None:
        if data:
            self._left.insert(0, data)

    def close(self) -> None: ...

    @property
    def left(self) -> bytes:
        return b"".join(self._left)


class Message(NamedTuple):
    """`first`: method and target, or status and reason. `headers`: without those that frame it."""

    first: tuple[str, str]
    headers: Headers
    body: bytes
    left: bytes


def plain(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in FRAMED]


async def whole(body: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in body])


async def asked_of(*come: bytes) -> Message | None:
    """None: there is no request. Raises Refused, OSError."""
    stream = Stream(*come)
    if (asked := await read_request(stream)) is None:
        return None
    body = await whole(asked.pieces())
    return Message((asked.method, asked.target), plain(asked.headers), body, stream.left)


async def answer_to(method: str, *come: bytes) -> Message:
    """Raises Refused, OSError."""
    stream = Stream(*come)
    answer = Answer(stream, method)
    await answer.head(lambda size: None)
    body = await whole(answer.pieces())
    return Message((str(answer.status), answer.reason), plain(answer.headers), body, stream.left)


async def result(work: Coroutine[Any, Any, Message | None]) -> Message | str | None:
    """What it returns, or why it does not."""
    try:
        return await work
    except (Refused, OSError) as error:
        return f"{type(error).__name__}: {error}"


def result_of(
    read: Callable[..., Coroutine[Any, Any, Message | None]], data: bytes, at: list[int]
) -> Message | str | None:
    """As `result`, of bytes that come at once, in these parts and byte by byte: it is the same."""

    async def results() -> list[Message | str | None]:
        return [
            await result(read(*parts)) for parts in ([data], split(data, at), [bytes((byte,)) for byte in data])
        ]

    one, *others = asyncio.run(results())
    assert others == [one, one]
    return one


def by_h11(data: bytes, method: str | None = None) -> Message:
    """`method`: of the request that this answers; None: this is one. Raises h11.RemoteProtocolError."""
    connection = h11.Connection(h11.SERVER if method is None else h11.CLIENT, max_incomplete_event_size=1 << 20)
    if method is not None:
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        connection.send(h11.EndOfMessage())
    connection.receive_data(data.removeprefix(b"\r\n"))
    head, body, ended = None, b"", False
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Request | h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif event is h11.NEED_DATA and not ended:
            ended = True
            connection.receive_data(b"")
        else:
            assert isinstance(event, h11.InformationalResponse), event
    assert head is not None
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers.raw_items()]
    first = (
        (head.method.decode(), head.target.decode())
        if isinstance(head, h11.Request)
        else (str(head.status_code), head.reason.decode("latin-1"))
    )
    return Message(first, plain(texts), body, connection.trailing_data[0])


# ---------------------------------------------------------------- nearly HTTP

# fmt: off
LINES = [
    "Host: a.example", "Host: b.example", "Host:", "Content-Length: 3", "Content-Length: 5",
    "content-length: 3", "Content-Length: 3, 3", "Content-Length: 3,5", "Content-Length: 03",
    "Content-Length: +3", "Content-Length: ", "Content-Length: 3;", "Content-Length:3\t", "Content-Length: 0x3",
    "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked", "transfer-encoding:\tCHUNKED ",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: identity",
    "Transfer-Encoding:", "Transfer-Encoding: \x0bchunked", "Transfer-Encoding: chunked\xa0",
    "Transfer-Encoding : chunked", "Transfer-Encoding:\r\n chunked", "Transfer-Encoding", "X-A: b",
    "X: a\r\n b", "X: a\n\tb", "X: a\r\n ", " X: a", "X: \x00", "X: \x01", "X: a\rb", "X: a\r", "X: \x7f",
    "X: é", "X-é: a", "X\x00: a", ": a", "", "X;: a", "Connection: close", "Connection: x, Keep-Alive",
    "Expect: 100-continue", "Upgrade: h2c", "X: a\x0cb", "X: \x85",
]
REQUESTS = [
    "GET http://a.example/ HTTP/1.1", "POST / HTTP/1.1", "HEAD * HTTP/1.1", "CONNECT a.example:443 HTTP/1.1",
    "GET / HTTP/1.0", "GET / HTTP/1.2", "GET / HTTP/2.0", "GET / http/1.1", "GET /", "GET  / HTTP/1.1",
    "GET / ", "GET / HTTP/1.1 ", "GET /é HTTP/1.1", "GET /\t HTTP/1.1", "G(T / HTTP/1.1", " GET / HTTP/1.1", "",
    "\x00", "GET / HTTP/1.11", "GET / HTTP/01.1", "GET / / HTTP/1.1", "GET\t/ HTTP/1.1", "GET /\x7f HTTP/1.1",
]
STATUSES = [
    "HTTP/1.1 200 OK", "HTTP/1.0 200 OK", "HTTP/1.1 204", "HTTP/1.1 304 Not Modified", "HTTP/1.1 404 ",
    "HTTP/1.1 999 x", "HTTP/1.1 200\tOK", "HTTP/1.1 20 OK", "HTTP/1.1 2000 OK", "HTTP/1.1 000 x",
    "HTTP/2 200 OK", "HTTP/1.1 101 x", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 103\n\nHTTP/1.1 200 é", "HTTP/1.1 200 \x01", "ICY 200 OK", "HTTP/1.1  200 OK",
    "HTTP/1.1 200 OK\r\n x", "", "HTTP/1.1 200 a\rb", "HTTP/1.1 +20 OK", "HTTP/1.1 205 x",
]
BODIES = [
    "", "abc", "abcde", "3\r\nabc\r\n0\r\n\r\n", "0\r\n\r\n", "0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "03\r\nabc\r\n00\r\n\r\n", "A\r\n0123456789\r\n0\r\n\r\n", "a;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\n",
    "3 \r\nabc\r\n0\t\r\n\r\n", "3 ;x\r\nabc\r\n0\r\n\r\n", "3\nabc\n0\n\n", "3\r\nabcd\r\n0\r\n\r\n",
    "3\r\nab\r\n0\r\n\r\n", "0x3\r\nabc\r\n0\r\n\r\n", "+3\r\nabc\r\n0\r\n\r\n", "3\r\nabc0\r\n\r\n",
    "3;\n\r\nabc\r\n0\r\n\r\n", "3;a\rb\r\nabc\r\n0\r\n\r\n", "\r\n0\r\n\r\n", "0\r\n X: y\r\n\r\n",
    "0\r\nX\r\n\r\n", "0\r\nX: y\n\r\n", "0\r\nX: y\r\n z\r\n\r\n", "3\r\nabc\r\n0\r\n", "0\r\n\n",
    "0;a\x00\r\n\r\n", "3\r\n\r\n\r\r\n0\r\n\r\n", "1000000000000000\r\nab",
]
MUTANTS = [
    b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b"\x00", b":", b";", b",", b"0", b"a", b"\x0b", b"\x7f", b"\x80",
    b"\xff",
]
ENDS = [
    "\n", "\r", "\r\r\n", " \r\n",
]
# fmt: on


@st.composite
def nearly(draw: st.DrawFn, firsts: Sequence[str]) -> bytes:
    """A message that is right, or wrong in a few places."""
    odd = draw(
        st.sets(
            st.sampled_from(["front", "first", "host", "framing", "lines", "end", "behind", "bytes"]), max_size=2
        )
    )
    framing, bodies = draw(
        st.sampled_from(
            [(None, BODIES[:1]), ("Content-Length: 3", BODIES[1:2]), ("Transfer-Encoding: chunked", BODIES[3:])]
        )
    )
    lines = [draw(st.sampled_from(firsts if "first" in odd else firsts[:3])), "Host: a.example", framing]
    if "host" in odd:
        lines[1] = draw(st.sampled_from(LINES))
    if "framing" in odd:
        lines[2], bodies = draw(st.sampled_from([None, *LINES])), BODIES
    if "lines" in odd:
        lines += draw(st.lists(st.sampled_from(LINES), max_size=3))
    ends = [draw(st.sampled_from(ENDS)) if "end" in odd and not draw(st.integers(0, 2)) else "\r\n" for _ in lines]
    text = "".join(f"{line}{end}" for line, end in zip(lines, ends, strict=True) if line is not None) + "\r\n"
    text += draw(st.sampled_from(bodies))
    if "front" in odd:
        text = draw(st.sampled_from(["\r\n", "\r\n\r\n", "\n", "\r", " "])) + text
    if "behind" in odd:
        text += draw(st.sampled_from(["\r\n", "G", "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n"]))
    data = text.encode("latin-1")
    if "bytes" in odd:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.sampled_from(MUTANTS)) + data[at + draw(st.integers(0, 2)) :]
    return data


cuts = st.lists(st.integers(0, 400), max_size=12)


def split(data: bytes, at: Iterable[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    return [data[begin:end] for begin, end in pairwise(places)]


@given(nearly(REQUESTS), cuts)
@example(b"\r\n" + REQUEST + b"\r\n", [1])
@example(b"\r\n\r\n" + REQUEST + b"\r\n", [])
@example(REQUEST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [80])
def test_a_request_that_is_taken_is_the_one_that_h11_reads_however_it_is_split(data: bytes, at: list[int]) -> None:
    got = result_of(asked_of, data, at)
    if isinstance(got, Message):
        assert got == by_h11(data)


@given(nearly(STATUSES), st.sampled_from(["GET", "GET", "HEAD"]), cuts)
@example(b"HTTP/1.1 200 OK\r\nX: a\r\n \tb\r\n \r\nContent-Length: 0\r\n\r\n", "GET", [])
def test_an_answer_that_is_taken_is_the_one_that_h11_reads_however_it_is_split(
    data: bytes, method: str, at: list[int]
) -> None:
    got = result_of(partial(answer_to, method), data, at)
    if isinstance(got, Message):
        assert got == by_h11(data, method)


# ---------------------------------------------------------------- round trips

tokens = st.text("abcXYZ019-_.!~", min_size=1, max_size=12)
values = st.text([chr(code) for code in (*range(0x20, 0x7F), *range(0x80, 0x100))], max_size=30).map(
    lambda text: text.strip(" \t")
)
lines = st.lists(st.tuples(tokens.filter(lambda name: name.lower() not in (*FRAMED, "host", "expect")), values))
bodies = st.lists(st.binary(max_size=40), max_size=6)


async def parts(of: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in of:
        yield piece


@given(tokens, lines, bodies, st.sampled_from(["chunked", "length", None]), cuts)
def test_a_request_that_is_written_is_read_as_it_was_here_and_by_h11(
    method: str, headers: Headers, body: list[bytes], said: str | None, at: list[int]
) -> None:
    if said is None:
        body = []
    length: Length = "chunked" if said == "chunked" else len(b"".join(body)) if said else None
    stream, headers = Stream(), [("Host", "a.example"), *headers]
    sending = Sending(stream, method, "http://a.example/", headers, length)
    asyncio.run(sending.send(parts(body) if said else None))
    expected = Message((method, "http://a.example/"), headers, b"".join(body), b"")
    assert result_of(asked_of, stream.wrote, at) == by_h11(stream.wrote) == expected


@given(st.integers(200, 999), values, lines, bodies, st.sampled_from(["chunked", "length", None]), cuts)
def test_an_answer_that_is_written_is_read_as_it_was_here_and_by_h11(
    status: int, reason: str, headers: Headers, body: list[bytes], said: str | None, at: list[int]
) -> None:
    length: Length = len(b"".join(body)) if said == "length" else "chunked" if said else None

    async def answered(version: str, method: str) -> bytes:
        stream = Stream(f"{method} / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
        asked = await read_request(stream)
        assert asked is not None
        await asked.begin(status, headers, length, reason=reason)
        if method != "HEAD" and status not in (204, 304):
            for piece in body:
                await asked.add(piece)
        else:
            body.clear()
        await asked.finish()
        assert asked.reusable == (version == "1.1")
        return stream.wrote

    for version, method in (("1.1", "GET"), ("1.0", "GET"), ("1.1", "HEAD")):
        data = asyncio.run(answered(version, method))
        got = result_of(partial(answer_to, method), data, at)
        closes = [("Connection", "close")] if version == "1.0" else []
        assert got == by_h11(data, method) == Message((str(status), reason), headers + closes, b"".join(body), b"")


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
@example("GET", "/", "a\r\nX: y")
@example("X: y\r\nX", "/ HTTP/1.1\r\nX:", "\n")
@example("GET", "/ x", "a\r\n\r\nHTTP/1.1 200 OK")
def test_what_is_written_has_as_many_lines_as_it_was_given(name: str, target: str, value: str) -> None:
    for first in (lambda: request_line(name, target), lambda: status_line(200, value)):
        with suppress(Refused):
            assert not {"\n", "\r"} & set(first())
    try:
        data = written("GET / HTTP/1.1", [("Host", "a"), (name, value)])
    except Refused:
        return
    assert (data.count(b"\n"), data.count(b"\r"), data[-4:]) == (4, 4, b"\r\n\r\n")
    assert (
        request_of(data.decode("latin-1")).headers == [("Host", "a"), (name, value.strip(" \t"))]
        or name.lower() == "host"
    )


def test_a_body_that_is_written_is_as_long_as_it_says() -> None:
    framing_of = Framing(3)
    assert framing_of.piece(b"ab") == b"ab"
    with pytest.raises(ConnectionResetError, match="shorter"):
        framing_of.end()
    assert not framing_of.is_done
    with pytest.raises(ConnectionResetError, match="longer"):
        framing_of.piece(b"cd")
    assert Framing("chunked").piece(b"") == b"", "an empty piece is not the last chunk"


# ---------------------------------------------------------------- what is refused

CHUNKED = REQUEST + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = {
    "a line of LF alone": (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", "lines end with CR and LF"),
    "an empty line of LF alone": (b"GET / HTTP/1.1\r\nHost: a\r\n\n", "lines end with CR and LF"),
    "CR alone": (REQUEST + b"X: a\rY: b\r\n\r\n", "a header is not NAME: VALUE in a line"),
    "CR twice": (REQUEST + b"X: a\r\r\n\r\n", "a header is not"),
    "a folded header": (REQUEST + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n", "in a line"),
    "a folded first line": (b"GET / HTTP/1.1\r\n Host: a\r\nHost: a\r\n\r\n", "a header is not"),
    "a space before the colon": (REQUEST + b"Content-Length : 3\r\n\r\nabc", "a header is not"),
    "no colon": (REQUEST + b"X\r\n\r\n", "a header is not"),
    "no name": (REQUEST + b": x\r\n\r\n", "a header is not"),
    "a name beyond ASCII": (REQUEST + b"X\xe9: x\r\n\r\n", "a header is not"),
    "NUL": (REQUEST + b"X: \0\r\n\r\n", "a header is not"),
    "a control character": (REQUEST + b"X: \x1b\r\n\r\n", "a header is not"),
    "an old version": (b"GET / HTTP/0.9\r\n\r\n", "first line"),
    "a version of two digits": (b"GET / HTTP/1.10\r\nHost: a\r\n\r\n", "first line"),
    "two spaces": (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "first line"),
    "a tab": (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", "first line"),
    "two empty lines": (b"\r\n\r\n" + REQUEST + b"\r\n", "first line"),
    "an address beyond ASCII": (b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n", "first line"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "one Host"),
    "two hosts": (REQUEST + b"host: a.example\r\n\r\n", "one Host"),
    "lengths that differ": (REQUEST + b"Content-Length: 1\r\ncontent-length: 2\r\n\r\nab", "one length"),
    "a list of lengths that differ": (REQUEST + b"Content-Length: 1, 2\r\n\r\nab", "one length"),
    "an empty length": (REQUEST + b"Content-Length:\r\n\r\n", "one length"),
    "a length with a sign": (REQUEST + b"Content-Length: +1\r\n\r\na", "one length"),
    "a length with an underscore": (REQUEST + b"Content-Length: 1_0\r\n\r\n0123456789", "one length"),
    "a length in other digits": (REQUEST + b"Content-Length: \xb2\r\n\r\nab", "one length"),
    "a length without end": (REQUEST + b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\n", "one length"),
    "length and chunks": (
        REQUEST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "one way",
    ),
    "chunks and length": (
        REQUEST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "one way",
    ),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "one way"),
    "packed and in chunks": (REQUEST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "in chunks"),
    "two encodings": (
        REQUEST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        "in chunks",
    ),
    "a vertical tab": (REQUEST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", "a header is not"),
    "a space that is none": (REQUEST + b"Transfer-Encoding: chunked\xa0\r\n\r\n0\r\n\r\n", "in chunks"),
    "a chunk with 0x": (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", "its length"),
    "a chunk with a sign": (CHUNKED + b"-1\r\na\r\n0\r\n\r\n", "its length"),
    "a chunk with an underscore": (CHUNKED + b"1_0\r\na\r\n0\r\n\r\n", "its length"),
    "a chunk of 16 digits": (CHUNKED + b"1" + b"0" * 15 + b"\r\na", "its length"),
    "a chunk and LF alone": (CHUNKED + b"1\na\n0\n\n", "its length"),
    "LF in an extension": (CHUNKED + b"1;\n\r\na\r\n0\r\n\r\n", "its length"),
    "CR in an extension": (CHUNKED + b"1;\rx\r\na\r\n0\r\n\r\n", "its length"),
    "a space before an extension": (CHUNKED + b"1 ;x\r\na\r\n0\r\n\r\n", "its length"),
    "an empty chunk line": (CHUNKED + b"\r\n0\r\n\r\n", "its length"),
    "an endless extension": (CHUNKED + b"1;" + b"x" * 5_000 + b"\r\na\r\n0\r\n\r\n", "its length"),
    "a chunk that is longer": (CHUNKED + b"1\r\nab\r\n0\r\n\r\n", "longer"),
    "a chunk and LF": (CHUNKED + b"1\r\na\n\r\n0\r\n\r\n", "longer"),
    "a trailer that is none": (CHUNKED + b"0\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "behind the last"),
    "a folded trailer": (CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n", "behind the last"),
    "an endless trailer": (CHUNKED + b"0\r\nX: " + b"x" * 5_000 + b"\r\n\r\n", "behind the last"),
    "many trailers": (CHUNKED + b"0\r\n" + b"X: y\r\n" * 600 + b"\r\n", "behind the last"),
    "a long head": (REQUEST + b"X: " + b"x" * 70_000 + b"\r\n\r\n", "over 65536 bytes"),
    "many lines": (REQUEST + b"x:y\r\n" * 600 + b"\r\n", "over 500 lines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_with_words_that_say_why(case: str) -> None:
    data, why = REFUSED[case]
    got = result_of(asked_of, data, [100, 2_000, 6_000])
    assert isinstance(got, str)
    assert got.startswith("Refused")
    assert why in got


@pytest.mark.parametrize(
    "data",
    [REQUEST + b"\r", REQUEST + b"Content-Length: 3\r\n\r\nab", CHUNKED + b"3\r\nab", CHUNKED + b"3\r\nabc\r\n",
     CHUNKED + b"0\r\n", CHUNKED + b"0\r\nX: y\r\n", CHUNKED + b"3", CHUNKED + b"3\r\nabc\r", b"\r", b"\r\nG"],
)  # fmt: skip
def test_a_request_without_end_broke_off(data: bytes) -> None:
    got = result_of(asked_of, data, [len(data) - 1])
    assert isinstance(got, str)
    assert got.startswith("ConnectionResetError")


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_no_request_is_none(data: bytes) -> None:
    assert result_of(asked_of, data, [1]) is None


NEXT = b"GET / HTTP/1.1\r\nHost: b\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (REQUEST + b"\r\n", b""),
        (REQUEST + b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (REQUEST + b"Content-Length: 3, 3\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (CHUNKED + b"A;x=\"y\"\r\n0123456789\r\n1\r\na\r\n000\r\nX: y\r\n\r\n", b"0123456789a"),
        (b"\r\n" + REQUEST + b"\r\n", b""),
        (b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    ],
)  # fmt: skip
def test_what_follows_a_request_is_left_for_the_next_one(data: bytes, body: bytes) -> None:
    got = result_of(asked_of, data + NEXT, [len(data) - 1, len(data) + 1])
    assert isinstance(got, Message)
    assert (got.body, got.left) == (body, NEXT)


# ---------------------------------------------------------------- what servers say

READ = {
    "LF alone": (b"HTTP/1.1 200 OK\nX: y\n\nall", [("X", "y")], b"all"),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nab", [], b"a"),
    "an empty reason": (b"HTTP/1.1 200 \r\n\r\nab", [], b"ab"),
    "a reason beyond ASCII": (b"HTTP/1.1 200 \xc3\xa4\r\n\r\nab", [], b"ab"),
    "until it closes": (ANSWER + b"\r\nab", [], b"ab"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", [], b"ab"),
    "answers before it": (b"HTTP/1.1 100\r\n\r\nHTTP/1.1 103 x\r\nLink: y\r\n\r\n" + ANSWER + b"\r\n", [], b""),
    "an empty line before it": (b"\r\n" + ANSWER + b"\r\na", [], b"a"),
    "great digits": (ANSWER + b"Transfer-Encoding: Chunked\n\n0A\r\naaaaaaaaaa\r\n0\r\n\r\n", [], b"a" * 10),
    "padded chunks": (ANSWER + b"Transfer-Encoding: chunked\r\n\r\n00000001  \r\na\r\n0 \r\n\r\n", [], b"a"),
    "chunks and a length": (ANSWER + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [], b""),
    "the length twice": (ANSWER + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", [], b"a"),
    "a folded header": (ANSWER + b"X: a;\r\n \t b;\n\tc\r\nY:\r\n z\r\n\r\n", [("X", "a; b; c"), ("Y", "z")], b""),
    "a folded length": (ANSWER + b"Content-Length:\r\n 1\r\n\r\nab", [], b"a"),
    "no space": (ANSWER + b"X:y\r\nZ:\r\nU: \xe9\t\r\n\r\n", [("X", "y"), ("Z", ""), ("U", "\xe9")], b""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_odd_answers_that_are_right_are_read(case: str) -> None:
    data, headers, body = READ[case]
    got = result_of(partial(answer_to, "GET"), data, [5, 20, 30])
    assert isinstance(got, Message)
    assert (got.headers, got.body) == (headers, body)


@pytest.mark.parametrize(
    "data",
    [b"HTTP/1.1 200 OK\r\n X: y\r\n\r\n", b"HTTP/1.1 101 x\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"ICY 200 OK\r\n\r\n",
     b"HTTP/1.1 2x0 OK\r\n\r\n", b"<html>\n\n", ANSWER + b"X: a\rY: b\r\n\r\n", ANSWER + b"X : a\r\n\r\n",
     ANSWER + b"Transfer-Encoding: gzip\r\n\r\n", ANSWER + b"Transfer-Encoding: chunked\nContent-Length: -1\n\n",
     ANSWER + b"X: " + b"x" * 70_000 + b"\r\n\r\n", b"HTTP/1.1 103 x\r\n\r\n" * 200 + ANSWER + b"\r\n"],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(data: bytes) -> None:
    got = result_of(partial(answer_to, "GET"), data, [20])
    assert isinstance(got, str)
    assert got.startswith("Refused: the other side")


@pytest.mark.parametrize(
    ("method", "data", "left", "reusable"),
    [
        ("GET", ANSWER + b"Content-Length: 2\r\n\r\nab", b"", True),
        ("GET", ANSWER + b"Content-Length: 2\r\n\r\nabc", b"c", True),
        ("GET", ANSWER + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nab", b"", False),
        ("GET", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", b"", False),
        ("GET", ANSWER + b"\r\nab", b"", False),
        ("GET", b"HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\nab", b"ab", True),
        ("GET", b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"", True),
        ("HEAD", ANSWER + b"Content-Length: 2\r\n\r\nab", b"ab", True),
        ("HEAD", ANSWER + b"\r\n", b"", True),
    ],
)
def test_a_connection_is_used_again_whose_answer_was_read_to_its_end(
    method: str, data: bytes, left: bytes, reusable: bool
) -> None:
    """What is left behind an answer keeps it from that too: `Connection.open` asks whether it is quiet."""

    async def ask() -> None:
        stream = Stream(data)
        sending = Sending(stream, method, "/", [("Host", "a")], None)
        await sending.send(None)
        await sending.answer.head(lambda size: None)
        assert not sending.reusable or sending.answer.length == 0
        await whole(sending.answer.pieces())
        assert (stream.left, sending.reusable) == (left, reusable)

    asyncio.run(ask())


def test_an_answer_that_comes_while_the_request_is_sent_leaves_nothing_to_be_used_again() -> None:
    async def ask() -> None:
        stream = Stream(ANSWER + b"Content-Length: 0\r\n\r\n")
        sending = Sending(stream, "POST", "/", [("Host", "a")], 3)
        with pytest.raises(ConnectionResetError, match="shorter"):
            await sending.send(parts([b"ab"]))
        await sending.answer.head(lambda size: None)
        await whole(sending.answer.pieces())
        assert sending.answer.leaves_open
        assert not sending.reusable

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("head", "status", "length", "expected"),
    [
        ("GET / HTTP/1.1", 200, None, b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"),
        ("GET / HTTP/1.1", 200, 2, b"Content-Length: 2\r\n\r\nab"),
        ("GET / HTTP/1.0", 200, "chunked", b"Connection: close\r\n\r\nab"),
        ("GET / HTTP/1.0", 200, 2, b"Content-Length: 2\r\nConnection: close\r\n\r\nab"),
        ("HEAD / HTTP/1.1", 200, 99, b"Content-Length: 99\r\n\r\n"),
        ("GET / HTTP/1.1", 304, 99, b"Content-Length: 99\r\n\r\n"),
        ("GET / HTTP/1.1", 204, 99, b"HTTP/1.1 204 \r\n\r\n"),
        ("GET / HTTP/1.1", 204, "chunked", b"HTTP/1.1 204 \r\n\r\n"),
    ],
)  # fmt: skip
def test_an_answer_is_framed_for_who_asked(head: str, status: int, length: Length, expected: bytes) -> None:
    async def answer() -> bytes:
        stream = Stream(f"{head}\r\nHost: a\r\n\r\n".encode())
        asked = await read_request(stream)
        assert asked is not None
        await asked.begin(status, [], length)
        if expected.endswith((b"ab", b"0\r\n\r\n")):
            await asked.add(b"ab")
        await asked.finish()
        return stream.wrote

    assert asyncio.run(answer()).endswith(expected)


def test_who_waits_for_100_continue_gets_it_when_the_body_is_wanted_and_no_answer_has_begun() -> None:
    async def answered(begun: bool, version: str) -> bytes:
        head = f"PUT / HTTP/{version}\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
        stream = Stream(head.encode(), b"ab")
        asked = await read_request(stream)
        assert asked is not None
        if begun:
            await asked.begin(413, [], 0)
            await asked.finish()
            assert not asked.reusable
        assert await whole(asked.pieces()) == b"ab"
        return stream.wrote

    assert asyncio.run(answered(False, "1.1")) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert asyncio.run(answered(False, "1.0")) == b""
    assert b"100" not in asyncio.run(answered(True, "1.1"))


def test_headers_of_one_connection_are_not_handed_on() -> None:
    headers = [("Connection", "X-One, \tx-two"), ("connection", "Keep-Alive"), ("X-ONE", "1"), ("x-Two", "2"),
               ("X-Three", "3"), ("TE", "trailers"), ("Proxy-Authenticate", "x"), ("Host", "x")]  # fmt: skip
    assert handed_on(headers) == [("X-Three", "3")]
    assert framing("chunked") == [("Transfer-Encoding", "chunked")]


# ---------------------------------------------------------------- work


WORK: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
    "a head in crumbs": lambda: asked_of(
        *split(REQUEST + b"X: " + b"x" * 65_000 + b"\r\n\r\n", range(0, 66_000, 3))
    ),
    "a head that is followed by much": lambda: asked_of(REQUEST + b"\r\n" + b"x" * (256 << 10)),
    "a value of spaces": lambda: asked_of(REQUEST + b"X:" + b" \t" * 32_000 + b"\x01\r\n\r\n"),
    "a connection of many words": lambda: asked_of(REQUEST + b"Connection: " + b"a," * 32_000 + b"\r\n\r\n"),
    "many lengths": lambda: asked_of(REQUEST + b"Content-Length: " + b"0," * 32_000 + b"0\r\n\r\n"),
    "an extension of spaces": lambda: asked_of(CHUNKED + b"1;" + b" " * 4_000 + b"\x01\r\n"),
    "a chunk of spaces": lambda: asked_of(CHUNKED + b"1" + b" " * 4_000 + b"\x01\r\n"),
    "a line without end": lambda: asked_of(CHUNKED + b"1;" + b"x" * (256 << 10)),
    "answers before the answer": lambda: answer_to("GET", b"HTTP/1.1 103 x\r\n\r\n" * 14_000),
}


@pytest.mark.parametrize("case", WORK)
def test_no_bytes_take_long(case: str) -> None:
    async def work() -> float:
        begun_s = process_time()
        await result(WORK[case]())  # type: ignore[arg-type]
        return process_time() - begun_s

    assert min(asyncio.run(work()) for _ in range(3)) < 0.1


def test_small_chunks_come_in_pieces_and_others_have_their_turn() -> None:
    async def turns() -> tuple[int, int, int]:
        count, done = 0, asyncio.Event()

        async def other() -> None:
            nonlocal count
            while not done.is_set():
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        stream = Stream(b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n")
        got = [piece async for piece in pieces("chunked", stream.read, stream.unread)]
        done.set()
        await task
        return count, len(got), len(b"".join(got))

    turned, number, size = asyncio.run(turns())
    assert size == 40_000
    assert turned > 1_000
    assert number < 2_000
