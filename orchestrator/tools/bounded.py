"""HTTP answers that end: what a client of the `httpx` family reads of one is bounded, and plain."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

# A few compressed bytes can be gigabytes: what is counted must be what is kept.
IDENTITY = {"Accept-Encoding": "identity"}


class AnswerTooLarge(Exception):
    """An answer that is not read to its end."""


def bound(max_bytes: int) -> Callable[[Any], Awaitable[None]]:
    """A hook for responses, called when the headers are there and the body is not. Raises AnswerTooLarge."""

    async def hook(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise AnswerTooLarge("a compressed answer, though it was asked for a plain one")
        kind: Any = type(response.stream)
        response.stream = _bounded(kind)(response.stream, max_bytes)

    return hook


@functools.lru_cache
def _bounded(kind: Any) -> Any:
    """Made of the stream's own class: `httpx` and its forks each take no other."""

    class Bounded(kind):  # type: ignore[misc]
        """A response's bytes, up to the limit."""

        def __init__(self, stream: Any, max_bytes: int) -> None:
            self._stream = stream
            self._max_bytes = max_bytes

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = self._max_bytes
            async for chunk in self._stream:
                left -= len(chunk)
                if left < 0:
                    raise AnswerTooLarge(f"an answer of more than {self._max_bytes} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Bounded
