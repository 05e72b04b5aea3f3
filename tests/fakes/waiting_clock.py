"""A clock that only waits move: what takes minutes takes no time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orchestrator.completion.startup import Patience, Wait


class WaitingClock:
    """`slept`: the pauses so far. `told`: what was told of waits. `before`: called with the number of each pause,
    from 1, as it begins."""

    def __init__(self, before: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []
        self.told: list[Wait] = []
        self._before = before

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self._before is not None:
            await self._before(len(self.slept))
        await asyncio.sleep(0)
        self.now_s += seconds

    def patience(self, timeout_s: float = 300.0) -> Patience:
        return Patience(timeout_s, self.told.append, lambda: self.now_s, self.sleep)
