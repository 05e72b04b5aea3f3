"""Numbered calls: each is carried out once, and a repeated call gets the same answer."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

CANCEL_S = 5.0  # an operator's own tool may refuse to be cancelled


class SequenceError(Exception):
    """A sequence number came again with other content, or out of order. Answered with ABORTED."""


@dataclass(slots=True)
class _Call(Generic[T]):
    """A call that is being answered, or whose answer is kept."""

    digest: bytes
    task: asyncio.Task[T]


class NumberedCalls(Generic[T]):
    """Answers numbered requests once: the same request again gets the same answer, never a second one.

    At most `together` are answered at a time. Those may arrive in another order than that of their numbers. The
    last 2 * `together` answers are kept for repetitions.
    """

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._calls: dict[int, _Call[T]] = {}
        self._forgotten: set[int] = set()  # numbers whose answers are not kept any more
        self._highest = 0

    async def answer(self, sequence: int, content: bytes, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make`, or the one it gave for the same call before. Raises SequenceError."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        call = self._calls.get(sequence) or self._begin(sequence, digest, make)
        if call.digest != digest:
            raise SequenceError(f"call {sequence} came before with other content")
        # Shielded: a client that disconnects and repeats the call must get the same answer.
        return await asyncio.shield(call.task)

    def _begin(self, sequence: int, digest: bytes, make: Callable[[], Awaitable[T]]) -> _Call[T]:
        if sequence in self._forgotten or not self.may_come(sequence):
            raise SequenceError(f"call {sequence} after call {self._highest}")
        ended = [number for number, call in self._calls.items() if call.task.done()]
        if len(self._calls) - len(ended) >= self._together:
            raise SequenceError(f"{self._together} calls are still being answered")
        for number in ended[: 1 - 2 * self._together]:
            self._forgotten.add(number)
            del self._calls[number]
        call = self._calls[sequence] = _Call(digest, asyncio.ensure_future(make()))
        self._highest = max(self._highest, sequence)
        return call

    def came(self, sequence: int) -> bool:
        """Whether such a call is being answered, or was."""
        return sequence in self._calls or sequence in self._forgotten

    def may_come(self, sequence: int) -> bool:
        """Whether such a call came, or may be on its way."""
        return 0 < sequence <= self._highest + self._together

    def passed(self, sequence: int) -> None:
        """This call may never come: later ones do not wait for it."""
        self._highest = max(self._highest, sequence)

    async def ended(self, sequence: int) -> None:
        """Waits until this call is answered, if it is being answered; at most CANCEL_S."""
        if (call := self._calls.get(sequence)) is not None:
            await asyncio.wait([call.task], timeout=CANCEL_S)

    async def aclose(self) -> None:
        """Cancels the calls being carried out. Idempotent."""
        tasks = [call.task for call in self._calls.values() if not call.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
