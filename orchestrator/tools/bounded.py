"""Bounds HTTP answers: clients of the `httpx` family read so many bytes at most, and none compressed."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

# A few compressed bytes can become gigabytes, so compressed answers are refused.
IDENTITY = {"Accept-Encoding": "identity"}


class AnswerTooLarge(Exception):
    """An answer is too long or compressed, and is not read to its end."""


def bound(max_bytes: int) -> Callable[[Any], Awaitable[None]]:
    """A hook for responses, called after the headers and before the body. Raises AnswerTooLarge."""

    async def hook(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise AnswerTooLarge("a compressed answer, though it was asked for a plain one")
        kind: Any = type(response.stream)
        response.stream = _bounded(kind)(response.stream, max_bytes)

    return hook


@functools.lru_cache
def _bounded(kind: Any) -> Any:
    """A subclass of the stream's own class, as `httpx` and its forks each accept no other."""

    class Bounded(kind):  # type: ignore[misc]
        """A response's bytes, up to the limit."""

        def __init__(self, stream: Any, max_bytes: int) -> None:
            self._stream = stream
            self._max_bytes = max_bytes

        async def __aiter__(self) -> AsyncIterator[bytes]:
            rest = self._max_bytes
            async for chunk in self._stream:
                rest -= len(chunk)
                if rest < 0:
                    raise AnswerTooLarge(f"an answer of more than {self._max_bytes} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Bounded
