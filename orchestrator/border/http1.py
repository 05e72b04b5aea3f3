"""HTTP/1.1 as it is written (RFC 9112): heads, how long their bodies are, and bodies; read strictly.

It reads less than the RFC allows: whatever two readers could understand differently is refused. What it takes, h11
takes in the same way (the tests compare them), but for what trailers say, which are dropped; h11 took a third of
the time of a request.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from orchestrator.rules.egress import Refused

Headers = list[tuple[str, str]]  # names as they were written
Named = Mapping[str, Sequence[str]]  # the values of headers, by their names in small letters
Length = int | Literal["chunked"] | None  # of a body; None: nothing says it
Read = Callable[[], Awaitable[bytes]]  # what has come, at least one byte; empty at the end. Raises OSError
Unread = Callable[[bytes], None]

_HEAD_BYTES = 64 << 10
_MOST_LINES = 500  # of a head, or behind a body's chunks
_LINE_BYTES = 4 << 10  # of a line before a chunk, or behind the last one
_MOST_CHUNKS = 32  # that are read in a row: each may be of one byte, and others have their turn in between
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = r"[\t\x20-\x7e\x80-\xff]*"
_REQUEST = re.compile(rf"({_TOKEN}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS = re.compile(rf"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ({_TEXT}))?")
_FIELD = re.compile(rf"({_TOKEN}):({_TEXT})")
_FIELDS = re.compile(rf"(?:{_TOKEN}:{_TEXT}\r\n)*")
_DIGITS = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*|;[\t\x20-\x7e\x80-\xff]*)\r\n")
_END = re.compile(rb"\n\r?\n")
_FOLD = re.compile(r"\r?\n[ \t]+")  # a header goes on in the next line


# ---------------------------------------------------------------- heads


async def read_head(data: bytes, read: Read, unread: Unread, *, strictly: bool) -> str:
    """A head that begins with `data`, in Latin-1, with the empty line behind it; what follows is unread. One empty
    line before it is passed over. Empty: there is none. `strictly`: each line ends with CR and LF. Raises Refused,
    OSError."""
    head: bytes | bytearray = data
    looked = 0
    while (match := _END.search(head, max(2, looked - 2))) is None:
        if len(head) > _HEAD_BYTES:
            raise Refused(f"the head is over {_HEAD_BYTES} bytes", 431)
        if not (data := await read()):
            if head not in (b"", b"\r\n"):
                raise ConnectionResetError("the head has no end")
            return ""
        looked = len(head)
        head = (head if isinstance(head, bytearray) else bytearray(head)) + data
    end = match.end()
    unread(bytes(head[end:]))
    if end > _HEAD_BYTES:
        raise Refused(f"the head is over {_HEAD_BYTES} bytes", 431)
    head = head[:end].removeprefix(b"\r\n")
    if (lines := head.count(b"\n")) > _MOST_LINES:
        raise Refused(f"the head has over {_MOST_LINES} lines", 431)
    if strictly and lines != head.count(b"\r\n"):
        raise Refused("lines end with CR and LF", 400)
    return head.decode("latin-1")


class Head(NamedTuple):
    """`first`: of a request, its method and target; of an answer, its status and the words behind it. `is_new`: it
    is of HTTP/1.1, not of HTTP/1.0."""

    first: tuple[str, str]
    is_new: bool
    headers: Headers
    named: Named

    @property
    def closes(self) -> bool:
        """Whether its connection ends behind it."""
        return not self.is_new or "close" in words(self.named.get("connection", ()))


def request_of(head: str) -> Head:
    """Raises Refused."""
    first, *lines = _lines(head)
    if (match := _REQUEST.fullmatch(first)) is None:
        raise Refused("this is no HTTP/1.1 that can be read in one way: its first line is no request", 400)
    read = Head((match[1], match[2]), match[3] == "1", *_fields(lines))
    hosts = len(read.named.get("host", ()))
    if hosts > 1 or (read.is_new and not hosts):
        raise Refused("a request has one Host header", 400)
    return read


def answer_of(head: str) -> Head:
    """A header may go on in the next line, as servers write long ones. Raises Refused."""
    if "\n " in head or "\n\t" in head:
        begin, rest = head.split("\n", 1)
        head = f"{begin}\n{_FOLD.sub(' ', rest)}"
    first, *lines = _lines(head)
    if (match := _STATUS.fullmatch(first)) is None:
        raise Refused("its first line has no status", 502)
    return Head((match[2], match[3] or ""), match[1] == "1", *_fields(lines))


def _lines(head: str) -> list[str]:
    return [line.removesuffix("\r") for line in head.split("\n")[:-2]]


def _fields(lines: Sequence[str]) -> tuple[Headers, Named]:
    headers: Headers = []
    for line in lines:
        if (match := _FIELD.fullmatch(line)) is None:
            why = "a header is not NAME: VALUE in a line"
            raise Refused(f"this is no HTTP/1.1 that can be read in one way: {why}", 400)
        headers.append((match[1], match[2].strip(" \t")))
    return headers, by_name(headers)


def by_name(headers: Iterable[tuple[str, str]]) -> Named:
    """Their values, in order."""
    named: dict[str, list[str]] = {}
    for name, value in headers:
        named.setdefault(name.lower(), []).append(value)
    return named


def words(values: Iterable[str]) -> set[str]:
    """In small letters; they stand between commas."""
    return {word.strip(" \t").lower() for value in values for word in value.split(",")}


def written(first: str, headers: Headers) -> bytes:
    """A head. Raises Refused: it would not be read as it was meant."""
    text = "".join(f"{name}: {value}\r\n" for name, value in headers)
    if not _FIELDS.fullmatch(text) or text.count("\n") != len(headers):
        raise Refused("a header cannot be written: it has a line break or other bytes that no header has", 502)
    return f"{first}\r\n{text}\r\n".encode("latin-1")


def request_line(method: str, target: str) -> str:
    """Raises Refused."""
    if not _REQUEST.fullmatch(line := f"{method} {target} HTTP/1.1"):
        raise Refused("the request cannot be written: its address has bytes that none has", 400)
    return line


def status_line(status: int, reason: str) -> str:
    """Raises Refused."""
    if status < 200 or not _STATUS.fullmatch(line := f"HTTP/1.1 {status} {reason}"):
        raise Refused("the answer is no HTTP: its status or the words behind it cannot be written", 502)
    return line


# ---------------------------------------------------------------- bodies


def length_of(named: Named) -> Length:
    """What headers say of the body. Raises Refused."""
    length: Length = None
    if said := named.get("content-length"):
        one, *others = {word.strip(" \t") for value in said for word in value.split(",")}
        if others or not _DIGITS.fullmatch(one):
            raise Refused("a body has one length, in digits", 400)
        length = int(one)
    if coded := named.get("transfer-encoding"):
        if len(coded) > 1 or coded[0].lower() != "chunked":
            raise Refused("a body comes in chunks, or as it is: no other transfer encoding is read", 501)
        length = "chunked"
    return length


async def pieces(length: Length, read: Read, unread: Unread) -> AsyncIterator[bytes]:
    """Of a body, to its end; what follows is unread. Raises Refused, OSError."""
    if length == "chunked":
        async for piece in _chunks(read, unread):
            yield piece
    elif length is None:
        while data := await read():
            yield data
    else:
        while length:
            data = await _some(read)
            if len(data) > length:
                unread(data[length:])
                data = data[:length]
            length -= len(data)
            yield data


async def _some(read: Read) -> bytes:
    if not (data := await read()):
        raise ConnectionResetError("the body has no end")
    return data


async def _chunks(read: Read, unread: Unread) -> AsyncIterator[bytes]:
    """Those that are there together make one piece. What stands behind the last one is dropped."""
    data, at, found = b"", 0, list[bytes]()
    while True:
        while (end := data.find(b"\n", at, at + _LINE_BYTES) + 1) == 0 and len(data) - at < _LINE_BYTES:
            if found:
                yield b"".join(found)
                found = []
            data, at = data[at:] + await _some(read), 0
        if (match := _CHUNK.fullmatch(data, at, end)) is None:
            raise Refused("a chunk does not say its length as it should", 400)
        at, left = end, int(match[1], 16)
        if not left:
            break
        while left > (here := len(data) - at):
            found.append(data[at:])
            left -= here
            if any(found):
                yield b"".join(found)
            data, at, found = await _some(read), 0, []
        found.append(data[at : at + left])
        at += left
        while len(data) - at < 2:
            if found:
                yield b"".join(found)
            data, at, found = data[at:] + await _some(read), 0, []
        if data[at : at + 2] != b"\r\n":
            raise Refused("a chunk is longer than it says", 400)
        at += 2
        if len(found) >= _MOST_CHUNKS:
            await asyncio.sleep(0)
            yield b"".join(found)
            found = []
    if found:
        yield b"".join(found)
    for _ in range(_MOST_LINES):
        while (end := data.find(b"\n", at, at + _LINE_BYTES) + 1) == 0 and len(data) - at < _LINE_BYTES:
            data, at = data[at:] + await _some(read), 0
        line, at = data[at:end], end
        if line == b"\r\n":
            unread(data[at:])
            return
        if not line.endswith(b"\r\n") or not _FIELD.fullmatch(line[:-2].decode("latin-1")):
            break
    raise Refused("what stands behind the last chunk cannot be read", 400)


class Framing:
    """Of a body that is written."""

    def __init__(self, length: Length) -> None:
        self._left = length
        self.is_done = False

    def piece(self, data: bytes) -> bytes:
        """As it goes out. Raises ConnectionResetError."""
        if not data or self._left is None:
            return data
        if self._left == "chunked":
            return b"%x\r\n%b\r\n" % (len(data), data)
        self._left -= len(data)
        if self._left < 0:
            raise ConnectionResetError("a body is longer than it says")
        return data

    def end(self) -> bytes:
        """Behind the last piece. Raises ConnectionResetError."""
        if self._left not in ("chunked", None, 0):
            raise ConnectionResetError("a body is shorter than it says")
        self.is_done = True
        return b"0\r\n\r\n" if self._left == "chunked" else b""
