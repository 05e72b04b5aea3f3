"""The name in the first words of TLS (RFC 8446, 4.1.2; RFC 6066, 3), read before it is decided where they lead.

They are the client's, and untrusted: bounded, and read strictly.
"""

from dataclasses import dataclass

from orchestrator.border.streams import Bytes
from orchestrator.rules.egress import Refused

MAX_BYTES = 32 << 10
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME, _ENCRYPTED = 22, 1, 0, 0, 0xFE0D
_RECORD_BYTES = (1 << 14) + 256


@dataclass(frozen=True, slots=True)
class Hello:
    """`name`: None: it names no server. `hidden`: it may name another one that only the server can read (ECH)."""

    name: str | None
    hidden: bool = False


async def read_hello(stream: Bytes) -> tuple[bytes, Hello]:
    """(all that was read, what it says). Each record is looked at once. Raises Refused: it is no TLS, or has no
    end."""
    data, message, at = bytearray(), bytearray(), 0  # the next record begins at `at`
    while True:
        while (end := _record_end(data, at)) <= len(data):
            message += data[at + 5 : end]
            at = end
            if message[0] != _CLIENT_HELLO:
                raise Refused("TLS begins with another word than a ClientHello", 400)
            if len(message) >= 4 and len(message) >= 4 + (size := int.from_bytes(message[1:4])):
                return bytes(data), hello_of(bytes(message[4 : 4 + size]))
        if len(data) > MAX_BYTES or not (piece := await stream.read()):
            raise Refused("the words of TLS have no end", 400)
        data += piece


def _record_end(data: bytearray, at: int) -> int:
    """Of the record that begins there; beyond the data: more has to come. Raises Refused."""
    if len(data) > at and data[at] != _HANDSHAKE:
        raise Refused("only TLS goes through CONNECT: ask for http:// in the plain way of a proxy", 400)
    if len(data) < at + 5:
        return at + 5
    size = int.from_bytes(data[at + 3 : at + 5])
    if data[at + 1] != 3 or not 0 < size <= _RECORD_BYTES:
        raise Refused("these are no words of TLS", 400)
    return at + 5 + size


def hello_of(hello: bytes) -> Hello:
    """What the body of a ClientHello says. Raises Refused: it has several names, or cannot be read."""
    try:
        rest = _Reader(hello)
        rest.take(34)  # version, random
        rest.take(rest.number(1))  # session
        rest.take(rest.number(2))  # ciphers
        rest.take(rest.number(1))  # compressions
        if not rest.left:
            return Hello(None)
        extensions = _Reader(rest.take(rest.number(2)))
        names, seen = [], set[int]()
        while extensions.left:
            kind = extensions.number(2)
            body = _Reader(extensions.take(extensions.number(2)))
            if kind in seen:
                raise ValueError(kind)
            seen.add(kind)
            if kind == _SERVER_NAME:
                entries = _Reader(body.take(body.number(2)))
                while entries.left:
                    if entries.number(1) != _HOST_NAME:
                        raise ValueError(kind)
                    names.append(entries.take(entries.number(2)).decode("ascii"))
                if body.left or len(names) != 1:
                    raise ValueError(kind)
        if rest.left:
            raise ValueError(rest.left)
        return Hello(names[0] if names else None, _ENCRYPTED in seen)
    except ValueError:  # a UnicodeDecodeError is one
        raise Refused("the words of TLS cannot be read", 400) from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """Raises ValueError."""
        if size > self.left:
            raise ValueError(size)
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))
