"""The time of a sandbox that is brought to where a record stands: when it gets an answer from there, and where its
clock goes on. `playback` says what it gets."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from orchestrator.proxy.clock import OwnClock
from orchestrator.proxy.playback import OtherState, Playback
from orchestrator.types import Entry, ToolCall, Turn


class PlaybackClock:
    """Sets the lease's clock."""

    def __init__(
        self, playback: Playback | None, clock: OwnClock, *, steps: bool, served: Callable[[Entry], None]
    ) -> None:
        """`playback` None: the rollout begins at its beginning. `steps`: its task has some. `served` gets what
        goes on record where the sandbox parts from it."""
        self.playback = playback
        self.asked = asyncio.Event()  # another request was begun, or one given up
        self._clock = clock
        self._steps = steps
        self._served, self._parted = served, False

    @property
    def plays(self) -> bool:
        """Whether some of the record is left to be served."""
        return self.playback is not None and not self.playback.over

    def part(self, unlike: OtherState) -> bool:
        """Whether the sandbox may go on where it is not what the record says."""
        assert self.playback is not None
        return self.playback.part(str(unlike))

    def look_whether_parted(self) -> None:
        """Where the sandbox is on its own since now, before the record was served to its end, the clock goes on
        from where it parted."""
        if self.playback is None or not self.playback.unlike or self._parted:
            return
        self._parted = True
        if (parting := self.playback.parting) is not None:
            told: tuple[Entry, ...] = (parting, *self.playback.given)
            for one in told:
                self._served(one)
        self._go_on()

    async def in_time(self, then: Turn | ToolCall, awaited: Callable[[], bool] = lambda: True) -> None:
        """Waits with an answer from the record until all is asked for that was asked for before it came, at most
        as long as it took then. Else a program that asks for it first would see by it whether it is on record,
        which may follow from what those others said."""
        with suppress(TimeoutError):
            async with asyncio.timeout(then.ended_s - then.started_s):
                while self.playback and self.playback.is_early(then.ended_s) and awaited():
                    self.asked.clear()
                    await self.asked.wait()

    def answered(self) -> None:
        """A completion came from the record. Behind the last one the clock goes on from where it was then."""
        assert self.playback is not None
        if self.playback.served or self._parted:
            self._go_on()

    def _go_on(self) -> None:
        """The clock goes on from where it was then. Own time that the sandbox took beyond that on its way counts:
        else it could win time by knowing that it is on its way. How long it waited for what it gave up is not on
        record."""
        assert self.playback is not None
        then, own_s = self.playback.stand, self._clock.own_s
        known = self.playback.served and not self.playback.lacks_some
        if known and not self._steps:  # between them the clock stood still, and nobody knows how long
            own_s = max(own_s, then.elapsed_s - then.waiting_s)
        elapsed_s = max(then.elapsed_s, then.waiting_s + own_s, self._clock.elapsed_s if self._parted else 0.0)
        self._clock.go_on(elapsed_s, own_s, max(then.sampling_s, self._clock.sampling_s if self._parted else 0.0))
