"""Slots bound how many rollouts run at a time, whoever begins them.

What becomes free goes to the waiting rollout whose group was begun first, retries and refills included. So groups
end in about the order in which they were begun."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")
F = TypeVar("F")


class Line(Generic[W, F]):
    """Who waits for something. `find` takes what there is for a wish; None: nothing now. `back` takes it back."""

    def __init__(self, find: Callable[[W], F | None], back: Callable[[F], None]) -> None:
        self._find, self._back = find, back
        self._turns, self._arrivals = itertools.count(), itertools.count()
        self._waiting: list[tuple[int, int, W, asyncio.Future[F | None]]] = []  # a heap

    def turn(self) -> int:
        """The next place in the order. All rollouts of a group share one."""
        return next(self._turns)

    async def wait(self, turn: int, wish: W) -> F | None:
        """The lowest turn is served first, then first come first. None, or an error: `end` was called."""
        given: asyncio.Future[F | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), wish, given))
        self.serve()
        try:
            return await given
        except asyncio.CancelledError:
            answered = given.done() and not given.cancelled() and given.exception() is None
            if answered and (found := given.result()) is not None:  # it was given in the same moment: pass it on
                self._back(found)
            raise

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not given.done() for *_, given in self._waiting)

    def serve(self) -> None:
        """Something may have become free."""
        while self._waiting:
            *_, wish, given = self._waiting[0]
            if not given.done():
                found = self._find(wish)
                if found is None:
                    return
                given.set_result(found)
            heapq.heappop(self._waiting)

    def end(self, error: BaseException | None = None) -> None:
        """All that wait get the error, or None."""
        waiting, self._waiting = self._waiting, []
        for *_, given in waiting:
            if given.done():
                continue
            if error is None:
                given.set_result(None)
            else:
                given.set_exception(error)


class Slots:
    """Shared by all executors that launch sandboxes under one budget."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._line: Line[None, Slots] = Line(self._take, lambda _: self.release())

    @property
    def waiting(self) -> int:
        """As `Line.waiting`."""
        return self._line.waiting

    def turn(self) -> int:
        """As `Line.turn`."""
        return self._line.turn()

    async def acquire(self, turn: int) -> None:
        """Waits for a slot, which `release` gives back."""
        await self._line.wait(turn, None)

    def release(self) -> None:
        """Gives the slot to the next one that waits."""
        self._free += 1
        self._line.serve()

    def _take(self, wish: None) -> Slots | None:
        if not self._free:
            return None
        self._free -= 1
        return self
