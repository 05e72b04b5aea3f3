"""Slots: so many rollouts at a time, whoever begins them.

One that comes free goes to the rollout whose group was begun first, retries and refills included: so groups end in
about the order in which they were begun."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Slots:
    """Shared by all that launch sandboxes under one budget."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._turns = itertools.count()
        self._arrivals = itertools.count()
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap

    def turn(self) -> int:
        """The next place in the order. Drawn once for all rollouts of a group."""
        return next(self._turns)

    async def acquire(self, turn: int) -> None:
        """Waits for a slot, to be given back by `release`: the lowest turn first, then who came first."""
        if self._free:  # then nobody waits
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (turn, next(self._arrivals), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # given in the same moment, and nobody is there to take it
                self.release()
            raise

    def release(self) -> None:
        """The slot goes to whoever is next."""
        while self._line:
            *_, given = heapq.heappop(self._line)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
