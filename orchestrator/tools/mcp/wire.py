"""What both ways to a server have in common: lines of JSON out, lines of JSON in."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

MAX_LINE_BYTES = 2 << 20  # of one message; a longer one is not read
_LOST = -32000  # JSON-RPC leaves these numbers to implementations


class Wire(Protocol):
    """Lines to and from one server."""

    @property
    def last_words(self) -> str:
        """What the server said outside of the protocol."""

    async def send(self, line: bytes, number: int | None) -> None:
        """`number`: of the request that the line is; None: it is none. Raises OSError when nobody reads."""

    def lines(self) -> AsyncIterator[bytes]:
        """What the server says, until it ends. The answer to a request that came to nothing is an error."""


Dial = AbstractAsyncContextManager[Wire]


def lost(number: int, why: str) -> bytes:
    """The line that stands for an answer which cannot be read."""
    error = {"code": _LOST, "message": why}
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode()
