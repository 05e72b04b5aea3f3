"""Numbered calls: each is carried out once, and a repeated call gets the same answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CANCEL_S = 5.0  # an operator's own tool may refuse to be cancelled


class SequenceError(Exception):
    """A sequence number came again with other content, or out of order. Answered with ABORTED."""


class Once(Generic[T]):
    """Answers numbered requests once: the same request again gets the same answer, never a second one."""

    def __init__(self) -> None:
        self._sequence = 0
        self._digest = b""
        self._task: asyncio.Task[T] | None = None

    async def answer(self, sequence: int, content: bytes, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make`, or the one it gave for the same call before. Raises SequenceError."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if sequence == self._sequence + 1:
            if self._task is not None and not self._task.done():
                raise SequenceError(f"call {self._sequence} is still being answered")
            self._sequence, self._digest = sequence, digest
            self._task = asyncio.ensure_future(make())
        elif self._task is None or sequence != self._sequence or digest != self._digest:
            raise SequenceError(f"call {sequence} after call {self._sequence}")
        # Shielded: a client that disconnects and repeats the call must get the same answer.
        return await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """Cancels the call being carried out. Idempotent."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_S)
