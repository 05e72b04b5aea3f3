"""How many sandboxes are being started at a time: as many as the machine can start without slowing each down.

Starting a sandbox costs CPU time, in the Engine and inside. Past some number of simultaneous starts none finishes
sooner and all are late, on a crowded machine too late. The right number depends on cores, Engine and other load,
so it is found by trial: it grows while starts take about as long as the quickest one, and shrinks when they take
much longer. It does not go below one per core, as cores would be idle while the Engine waits for its disk. Only if
starts fail, or take alarmingly long, it goes down to one.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic as now_s

_SLACK = 2.0  # a start may take so many times as long as the quickest one
_LESS = 0.7
_ALARMING_S = 15.0  # a quarter of PARK_TIMEOUT_S
_PER_CORE = 4


class Ramp:
    """A gate before every start. Under overload it delays starts; it never refuses one."""

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: of the machine that runs the sandboxes; by default, this one."""
        cores = cores or len(os.sched_getaffinity(0))
        self._cores = float(cores)
        self._most = float(_PER_CORE * cores)
        self._limit = float(cores)
        self._starting = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        # The quickest of the whole run: a recent minimum could already be slowed down by our own starts.
        self._quickest_s = float("inf")
        self._full_at = self._lowered_at = float("-inf")

    @property
    def limit(self) -> int:
        """How many sandboxes may be starting now."""
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
        self._queue.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.remove(turn)
            else:  # the turn came together with the cancel
                self._starting -= 1
            self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and self._starting < self.limit:
            if self._queue[0].cancelled():
                return  # its owner takes it out and calls again
            self._starting += 1
            self._queue.popleft().set_result(None)
            if self._starting >= self.limit:
                self._full_at = now_s()

    def _learn(self, began: float, ended: float) -> None:
        took_s = ended - began
        self._quickest_s = min(self._quickest_s, took_s)
        if took_s > _ALARMING_S:
            self._lower(began, ended, least=1.0)
        elif took_s > _SLACK * self._quickest_s:
            self._lower(began, ended, least=min(self._limit, self._cores))
        elif began <= self._full_at:  # only if the limit was reached meanwhile is it known to work
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def _lower(self, began: float, ended: float, least: float) -> None:
        """Lowers the limit, once for all starts that were under way together."""
        if began >= self._lowered_at:
            self._limit = max(least, self._limit * _LESS)
            self._lowered_at = ended
