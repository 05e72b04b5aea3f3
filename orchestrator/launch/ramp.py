"""How many sandboxes are in the making at a time: as many as the machine takes without each taking longer.

Starting a sandbox is CPU time, of the Engine and of what runs inside. Past some number of starts at once none
comes any sooner, and all of them come late: on a crowded machine not in time at all. The right number depends on
cores, Engine and whatever else the machine does, so it is felt for: one more while starts take about as long as
the quickest, fewer as soon as they take much longer. One per core is left to the scheduler: fewer would leave
cores idle in an Engine that waits for its disk. Only where starts fail, or take as long as would soon make them
fail, it goes down to one.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic as now_s

_SLACK = 2.0  # a start may take so many times as long as the quickest one
_LESS = 0.7
_ALARMING_S = 15.0  # a quarter of the time a sandbox is given to park
_PER_CORE = 4


class Ramp:
    """A gate before every start. It is never shut: overload makes it slow, not a failure."""

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: of the machine the sandboxes are on; by default, this one."""
        cores = cores or len(os.sched_getaffinity(0))
        self._cores = float(cores)
        self._most = float(_PER_CORE * cores)
        self._limit = float(cores)
        self._starting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        # Ever: forgotten, a crowd of our own making would soon pass for the machine's usual speed.
        self._quickest_s = float("inf")
        self._full_at = self._lowered_at = float("-inf")

    @property
    def limit(self) -> int:
        """How many may be in the making now."""
        return int(self._limit)

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        """One start, from its turn to the parked sandbox. First come, first served."""
        await self._turn()
        began = now_s()
        try:
            yield
            self._learn(began, now_s())
        except Exception:
            self._lower(began, now_s(), least=1.0)
            raise
        finally:
            self._starting -= 1
            self._admit()

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # it came together with the cancel
                self._starting -= 1
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._starting < self.limit:
            if self._waiting[0].cancelled():
                return  # its owner takes it out and calls again
            self._starting += 1
            self._waiting.popleft().set_result(None)
            if self._starting >= self.limit:
                self._full_at = now_s()

    def _learn(self, began: float, ended: float) -> None:
        took_s = ended - began
        self._quickest_s = min(self._quickest_s, took_s)
        if took_s > _ALARMING_S:
            self._lower(began, ended, least=1.0)
        elif took_s > _SLACK * self._quickest_s:
            self._lower(began, ended, least=min(self._limit, self._cores))
        elif began <= self._full_at:  # only what was tried is known to work
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def _lower(self, began: float, ended: float, least: float) -> None:
        """Once for all that were under way together."""
        if began >= self._lowered_at:
            self._limit = max(least, self._limit * _LESS)
            self._lowered_at = ended
