"""A rollout's own clock: it stands still while the sandbox waits for us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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


class _Span:
    """Seconds within its blocks, which may overlap: time counts once."""

    def __init__(self) -> None:
        self.open = 0
        self._ended_s = 0.0
        self._since = 0.0

    @property
    def total_s(self) -> float:
        return self._ended_s + (asyncio.get_running_loop().time() - self._since if self.open else 0.0)

    @contextmanager
    def more(self) -> Iterator[None]:
        if self.open == 0:
            self._since = asyncio.get_running_loop().time()
        self.open += 1
        try:
            yield
        finally:
            if self.open == 1:
                self._ended_s = self.total_s
            self.open -= 1


class OwnClock:
    """Counts seconds in the sandbox; waiting for completions and host tools is counted apart.

    Reads the event loop's monotonic time, so a step of the wall clock changes nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._started: float | None = None
        self._waits = _Span()
        self._sampling = _Span()
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
        return self._waits.total_s

    @property
    def sampling_s(self) -> float:
        """Seconds of these spent waiting for completions, not for host tools."""
        return self._sampling.total_s

    @property
    def own_s(self) -> float:
        """Seconds of it the sandbox used itself."""
        return self.elapsed_s - self.waiting_s

    @contextmanager
    def waiting(self, *, sampling: bool = False) -> Iterator[None]:
        """The sandbox waits for us within this block, for a completion if `sampling`. Blocks may overlap."""
        with self._waits.more(), self._sampling.more() if sampling else nullcontext():
            self._changed.set()
            try:
                yield
            finally:
                self._changed.set()

    async def expired(self) -> None:
        """Returns when the sandbox has used up its own time."""
        while True:
            self._changed.clear()
            left = None if self._started is None or self._waits.open else self._limit_s - self.own_s
            if left is not None and left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
