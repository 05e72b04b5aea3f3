"""The line of rollouts that wait for a slot.

A free slot goes to the waiting rollout whose group was begun first, retries and refills included. So groups end in
about the order in which they were begun."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")
F = TypeVar("F")


class Line(Generic[W, F]):
    """`find` takes a slot that fits a wish; None: there is none now. `back` gives a slot back."""

    def __init__(self, find: Callable[[W], F | None], back: Callable[[F], None]) -> None:
        self._find, self._back = find, back
        self._turns, self._arrivals = itertools.count(), itertools.count()
        self._waiting: list[tuple[int, int, W, asyncio.Future[F | None]]] = []  # a heap

    def turn(self) -> int:
        """The next place in the order. All rollouts of a group share one."""
        return next(self._turns)

    async def wait(self, turn: int, wish: W) -> F | None:
        """The lowest turn is served first, then first come first. None, or an error: `end` was called."""
        answer: asyncio.Future[F | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), wish, answer))
        self.serve()
        try:
            return await answer
        except asyncio.CancelledError:
            answered = answer.done() and not answer.cancelled() and answer.exception() is None
            if answered and (slot := answer.result()) is not None:  # it came in the same moment: pass it on
                self._back(slot)
            raise

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not answer.done() for *_, answer in self._waiting)

    def serve(self) -> None:
        """Something may have become free."""
        while self._waiting:
            *_, wish, answer = self._waiting[0]
            if not answer.done():
                slot = self._find(wish)
                if slot is None:
                    return
                answer.set_result(slot)
            heapq.heappop(self._waiting)

    def end(self, error: BaseException | None = None) -> None:
        """All that wait get the error, or None."""
        waiting, self._waiting = self._waiting, []
        for *_, answer in waiting:
            if answer.done():
                continue
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
