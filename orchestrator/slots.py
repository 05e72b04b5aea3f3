"""Slots bound how many rollouts run at a time, whoever begins them.

A free slot goes to the waiting rollout whose group was begun first, retries and refills included. So groups end in
about the order in which they were begun."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Slots:
    """Shared by all executors that launch sandboxes under one budget."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._turns = itertools.count()
        self._arrivals = itertools.count()
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap

    def turn(self) -> int:
        """The next place in the order. All rollouts of a group share one."""
        return next(self._turns)

    async def acquire(self, turn: int) -> None:
        """Waits for a slot, which `release` gives back. The lowest turn is served first, then first come first."""
        if self._free:  # then nobody waits
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (turn, next(self._arrivals), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # the slot was given in the same moment: pass it on
                self.release()
            raise

    def release(self) -> None:
        """Gives the slot to the next one that waits."""
        while self._line:
            *_, given = heapq.heappop(self._line)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
