"""A rollout's own clock: it stands still while the sandbox waits for the orchestrator, and while the orchestrator
itself does not run."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

_LOOKS = 60  # in the time of a rollout, and at most one a second: they show whether this process ran
_LATE_S = 0.5  # so late may a look be on a busy machine


class _Span(AbstractContextManager[None]):
    """Seconds spent within blocks of it. They may overlap: the time counts once."""

    def __init__(self) -> None:
        self.open = 0
        self._ended_s = 0.0
        self._since = 0.0

    @property
    def total_s(self) -> float:
        return self._ended_s + (asyncio.get_running_loop().time() - self._since if self.open else 0.0)

    def go_on(self, total_s: float) -> None:
        """From now on as if it had been so much so far."""
        self._ended_s, self._since = total_s, asyncio.get_running_loop().time()

    def __enter__(self) -> None:
        if self.open == 0:
            self._since = asyncio.get_running_loop().time()
        self.open += 1

    def __exit__(self, *_: object) -> None:
        if self.open == 1:
            self._ended_s = self.total_s
        self.open -= 1


class OwnClock:
    """Counts the seconds of a rollout; waiting for completions and host tools is counted separately.

    Reads the event loop's monotonic time, so a step of the wall clock changes nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._started: float | None = None
        self._waits = _Span()
        self._sampling = _Span()
        self._stood_s = 0.0  # in which this process did not run: it could not serve the sandbox
        self.went_on_s = 0.0  # where it went on from a record: what was begun on the way to there, begins there
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()

    def start(self) -> None:
        """Starts counting. Idempotent."""
        if self._started is None:
            self._started = asyncio.get_running_loop().time()
            self._begun.set()
            self._changed.set()

    def renew(self, limit_s: float) -> None:
        """From now on the sandbox has so much time."""
        self._limit_s = self.own_s + limit_s
        self._changed.set()

    def go_on(self, elapsed_s: float, own_s: float, sampling_s: float) -> None:
        """From now on as if so much had passed since the start, and all but `own_s` of it was waiting."""
        self._started = asyncio.get_running_loop().time() - elapsed_s
        self._waits.go_on(max(0.0, elapsed_s - own_s))
        self._sampling.go_on(min(sampling_s, self._waits.total_s))
        self._stood_s, self.went_on_s = 0.0, elapsed_s
        self._changed.set()

    async def started(self) -> None:
        """Waits for the start."""
        await self._begun.wait()

    @property
    def elapsed_s(self) -> float:
        """Wall clock since the start."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    @property
    def waiting_s(self) -> float:
        """Seconds of `elapsed_s` in which the sandbox waited for the orchestrator."""
        return self._waits.total_s

    @property
    def sampling_s(self) -> float:
        """Seconds of `waiting_s` in which it waited for completions, not for host tools."""
        return self._sampling.total_s

    @property
    def sampling(self) -> int:
        """How many completions the sandbox waits for now."""
        return self._sampling.open

    @property
    def own_s(self) -> float:
        """Seconds of `elapsed_s` in which the sandbox did not wait and this process ran."""
        return self.elapsed_s - self.waiting_s - self._stood_s

    @contextmanager
    def waiting(self, *, sampling: bool = False) -> Iterator[None]:
        """Within this block the sandbox waits, for a completion if `sampling`. Blocks may overlap."""
        with self._waits, self._sampling if sampling else nullcontext():
            self._changed.set()
            try:
                yield
            finally:
                self._changed.set()

    async def expired(self) -> None:
        """Returns when the sandbox has used up its own time."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            left = None if self._started is None or self._waits.open else self._limit_s - self.own_s
            if left is not None and left <= 0:
                return
            tick_s = None if left is None else min(left, max(1.0, self._limit_s / _LOOKS))
            before_s = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(tick_s):
                    await self._changed.wait()
            if tick_s is not None and (late_s := loop.time() - before_s - tick_s) > _LATE_S:
                self._stood_s += late_s
