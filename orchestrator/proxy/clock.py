"""A rollout's own clock: it stands still while the sandbox waits for us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

STANDSTILL_S = 20.0  # shorter than what the sandbox' connection bears, and than most rollouts' clocks
_LOOK_S = 5.0


async def standstill(longest_s: float = STANDSTILL_S, look_s: float = _LOOK_S) -> float:
    """Returns when this process itself did not run for so long, and for how long: stopped, or starved of CPU.

    Sandboxes go on meanwhile: what their clocks say, and how they ended, is no longer their own doing.
    """
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(look_s)
        stood_s = loop.time() - before - look_s
        if stood_s > longest_s:
            return stood_s


class OwnClock:
    """Counts seconds in the sandbox; waiting for completions and host tools is counted apart.

    Reads the event loop's monotonic time, so a step of the wall clock changes nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._started: float | None = None
        self._waited_s = 0.0
        self._waiting = 0
        self._waiting_since = 0.0
        self._changed = asyncio.Event()

    def start(self) -> None:
        """From now on time is counted."""
        self._started = asyncio.get_running_loop().time()
        self._changed.set()

    @property
    def elapsed_s(self) -> float:
        """Wall clock since the start."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    @property
    def waiting_s(self) -> float:
        """Seconds of it spent waiting for us."""
        now = asyncio.get_running_loop().time()
        return self._waited_s + (now - self._waiting_since if self._waiting else 0.0)

    @property
    def own_s(self) -> float:
        """Seconds of it the sandbox used itself."""
        return self.elapsed_s - self.waiting_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The sandbox waits for us within this block. Blocks may overlap; time counts once."""
        loop = asyncio.get_running_loop()
        if self._waiting == 0:
            self._waiting_since = loop.time()
        self._waiting += 1
        self._changed.set()
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._waited_s += loop.time() - self._waiting_since
            self._changed.set()

    async def expired(self) -> None:
        """Returns when the sandbox has used up its own time."""
        while True:
            self._changed.clear()
            left = None if self._started is None or self._waiting else self._limit_s - self.own_s
            if left is not None and left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
