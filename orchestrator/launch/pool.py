"""Sandboxes made ahead of their rollouts (warm): parked, verified, each used for one rollout, then replaced.

One task in this module owns each sandbox, warm or not, from creation to removal. A claim uses the sandbox, but the
task keeps owning it. `park` makes a sandbox and yields it verified. Which sandboxes are made ahead follows from
the rollouts that are known to come (`expecting`): a task may have an image of its own.
A sandbox that was begun ahead and does not come up, as when this process stood still meanwhile, costs no rollout
anything: the claim that waits for it gets one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from itertools import islice
from typing import Generic, Protocol, TypeVar

from orchestrator.errors import LaunchError, RolloutError, SandboxLostError
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import SandboxSpec

log = logging.getLogger(__name__)

IDLE_S = 60.0  # a warm sandbox not claimed for so long is one too many
_AFTER_FAILURES = Backoff(first_s=0.5, most_s=10.0)  # failures in a row


class Parked(Protocol):
    """What `park` yields."""

    @property
    def connected(self) -> bool:
        """Whether an assignment would reach the sandbox."""

    async def lost(self) -> str:
        """Waits until the sandbox can take no assignment any more. Returns the reason."""


P = TypeVar("P", bound=Parked)
Park = Callable[[SandboxSpec], AbstractAsyncContextManager[P]]


class _Place(Generic[P]):
    """One sandbox, from creation to removal."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.parked: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        self.claimed = asyncio.Event()
        self.done = asyncio.Event()
        self.task: asyncio.Task[None]

    @property
    def is_parked(self) -> bool:
        return self.parked.done() and self.parked.exception() is None

    @property
    def is_ready(self) -> bool:
        return self.is_parked and self.parked.result().connected

    @property
    def state(self) -> str:
        if self.done.is_set() or (self.parked.done() and not self.is_parked):
            return "ending"
        if not self.is_parked:
            return "starting"
        return "leased" if self.claimed.is_set() else "ready"


class WarmPool(Generic[P]):
    """`async with WarmPool(...) as pool`: at most `leased` claimed sandboxes and `warm` more, those being created
    and being removed included. `spec`: of most sandboxes.

    The number of warm ones follows the demand: one more after a claim that finds none parked, one less for each
    that was not claimed for `idle_s`. Until the first claim, `head_start` more are made, at most `leased`.
    `recovered` is awaited after a failure: it returns when creating sandboxes can work again.
    """

    def __init__(
        self,
        park: Park[P],
        spec: SandboxSpec,
        *,
        leased: int,
        warm: int,
        head_start: int = 0,
        recovered: Callable[[], Awaitable[None]] | None = None,
        idle_s: float = IDLE_S,
        backoff: Backoff = _AFTER_FAILURES,
    ) -> None:
        self._park = park
        self._spec = self._claimed_last = spec
        self._expected: dict[object, tuple[SandboxSpec, int]] = {}  # in the order of claims to come
        self._warm = warm
        self._target = warm
        self._head_start = min(head_start, leased) if warm else 0
        self._room = asyncio.Semaphore(leased + warm)
        self._recovered = recovered
        self._idle_s = idle_s
        self._backoff = backoff
        self._demands: list[Callable[[], float]] = []
        self._free: list[_Place[P]] = []  # unclaimed, oldest first
        self._all: set[_Place[P]] = set()
        self._closed = False
        self._broken: Exception | None = None  # an error that no retry can mend; claims raise it
        # What claims found: a sandbox that was ready, one being made, or none.
        self.claims = Counter({"ready": 0, "made": 0, "none": 0})
        self.started = 0  # sandboxes that were parked, and how long making these took
        self.starting_s = 0.0
        self._failures = 0
        self._pausing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WarmPool[P]:
        self._fill()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    @property
    def ready(self) -> list[SandboxSpec]:
        """The sandboxes that can be handed out at once."""
        return [place.spec for place in self._free if place.is_ready]

    @property
    def parked(self) -> int:
        """How many they are."""
        return len(self.ready)

    def states(self) -> dict[str, int]:
        """How many sandboxes are in each state."""
        return {"starting": 0, "ready": 0, "leased": 0, "ending": 0} | Counter(p.state for p in self._all)

    @property
    def spare(self) -> int:
        """How many sandboxes no rollout has: parked, being made ahead, being removed."""
        return sum(not place.claimed.is_set() or place.done.is_set() for place in self._all)

    @contextmanager
    def following(self, demand: Callable[[], float]) -> Iterator[None]:
        """Within this block no more sandboxes are made ahead than `demand` says rollouts will still need. The
        demands of several blocks add up. Outside of all blocks the demand is unlimited."""
        self._demands.append(demand)
        try:
            yield
        finally:
            self._demands.remove(demand)

    @contextmanager
    def expecting(self, spec: SandboxSpec, rollouts: int = 1) -> Iterator[None]:
        """Within this block so many rollouts wait to claim such a sandbox. Leave it right before a claim."""
        expectation = object()
        self._expected[expectation] = (spec, rollouts)
        self._fill()
        try:
            yield
        finally:
            del self._expected[expectation]

    @asynccontextmanager
    async def claim(self, spec: SandboxSpec) -> AsyncIterator[P]:
        """A sandbox for one rollout, a parked one if there is any. Its removal begins when the block is left;
        until it is removed it counts as a warm one.

        Raises what `park` raises: LaunchError, DockerError, SandboxLostError; DockerError and EnvironmentUnusable
        also if a sandbox made ahead raised it.
        """
        if self._broken is not None:
            raise self._broken
        place, ahead = self._take(spec)
        self._head_start = 0
        self._fill()
        try:
            try:
                parked = await asyncio.shield(place.parked)
            except (LaunchError, SandboxLostError) as error:
                if not ahead or self._closed:
                    raise
                log.warning("a warm sandbox: %s: %s", type(error).__name__, error)
                place = self._make_for_claim(spec)
                parked = await asyncio.shield(place.parked)
            yield parked
        finally:
            place.done.set()
            if not place.is_parked:
                place.task.cancel()

    def drain(self) -> None:
        """Stops making sandboxes ahead, and removes the unclaimed ones."""
        self._closed = True
        if self._pausing is not None:
            self._pausing.cancel()
        for place in list(self._free):
            self._discard(place)

    async def aclose(self) -> None:
        """Removes all sandboxes. Idempotent."""
        self.drain()
        for place in self._all:
            place.task.cancel()
        tasks = [place.task for place in self._all]
        if self._pausing is not None:
            tasks.append(self._pausing)
        if tasks:
            await uninterrupted(asyncio.wait(tasks))

    # ------------------------------------------------------------ who gets which

    def _take(self, spec: SandboxSpec) -> tuple[_Place[P], bool]:
        """The sandbox parked last, so that superfluous ones stay unclaimed; else the first one being made; else a
        new one. And whether it was begun ahead."""
        ready = [place for place in self._free if place.spec == spec and place.is_ready]
        coming = [place for place in self._free if place.spec == spec and not place.parked.done()]
        if not ready:
            self._target = min(self._warm, self._target + 1)
        self.claims["ready" if ready else "made" if coming else "none"] += 1
        if ready or coming:
            place = ready[-1] if ready else coming[0]
            self._free.remove(place)
            place.claimed.set()
        else:
            if len(self._free) > self._warm:  # a sandbox of the head start has to give way
                self._discard(self._free[0])
            place = self._make_for_claim(spec)
        self._claimed_last = spec
        return place, bool(ready or coming)

    def _fill(self) -> None:
        if self._closed or self._broken is not None or self._pausing is not None:
            return
        target = self._wanted_ahead()
        missing = Counter(target) - Counter(place.spec for place in self._free)
        superfluous = Counter(place.spec for place in self._free) - Counter(target)
        room, being_removed = len(target) - self.spare, sum(place.done.is_set() for place in self._all)
        for number, spec in enumerate(missing.elements()):
            if number < room:
                self._free.append(self._make(spec))
            elif number >= room + being_removed and superfluous:
                # The room is there when it is removed: then this is called again.
                oldest = next(place for place in self._free if place.spec in superfluous)
                self._discard(oldest)
                superfluous -= Counter([oldest.spec])

    def _wanted_ahead(self) -> list[SandboxSpec]:
        """What the unclaimed sandboxes should be. Of rollouts that are not known yet, as long as most have the
        pool's own spec, the same is expected."""
        demand = sum(demand() for demand in self._demands) if self._demands else math.inf
        target = math.ceil(min(self._target + self._head_start, demand))
        coming = (spec for spec, rollouts in self._expected.values() for _ in range(rollouts))
        expected = list(islice(coming, target))
        unknown = target - len(expected) if self._claimed_last == self._spec else 0
        return expected + [self._spec] * unknown

    def _make(self, spec: SandboxSpec) -> _Place[P]:
        place = _Place[P](spec)
        self._all.add(place)
        place.task = asyncio.create_task(self._keep(place), name="sandbox")
        place.task.add_done_callback(lambda task: self._on_end(place))  # a task cancelled at once never begins
        return place

    def _make_for_claim(self, spec: SandboxSpec) -> _Place[P]:
        place = self._make(spec)
        place.claimed.set()
        return place

    def _on_end(self, place: _Place[P]) -> None:
        self._all.discard(place)
        if place in self._free:
            self._free.remove(place)
        self._settle(place, LaunchError("the pool of sandboxes is closed"))
        self._fill()

    def _discard(self, place: _Place[P]) -> None:
        self._free.remove(place)
        place.done.set()
        place.task.cancel()

    # ------------------------------------------------------------ one sandbox

    async def _keep(self, place: _Place[P]) -> None:
        """Creates the sandbox, watches it until it is claimed, removes it when its rollout is over."""
        try:
            async with self._room:
                began_s = asyncio.get_running_loop().time()
                async with self._park(place.spec) as parked:
                    self.started += 1
                    self.starting_s += asyncio.get_running_loop().time() - began_s
                    self._failures = 0
                    place.parked.set_result(parked)
                    if not await self._claimed(place, parked):
                        return
                    await place.done.wait()
        except RolloutError as error:
            self._failed(place, error)
        except Exception as error:  # a bug, or a machine that cannot confine: the run must end
            self._broken = error
            self._settle(place, error)

    async def _claimed(self, place: _Place[P], parked: P) -> bool:
        """Waits for a claim. False: the sandbox is superfluous, or was lost."""
        if place.claimed.is_set():
            return True
        lost, claimed = asyncio.ensure_future(parked.lost()), asyncio.ensure_future(place.claimed.wait())
        try:
            while True:
                await asyncio.wait([lost, claimed], timeout=self._idle_s, return_when=asyncio.FIRST_COMPLETED)
                if place.claimed.is_set():
                    return True
                if lost.done():
                    self._free.remove(place)  # now it cannot be claimed any more
                    self._failed(place, LaunchError(f"it was lost while it waited: {lost.result()}"))
                    return False
                if self._target > 1 or len(self._free) > 1:
                    self._free.remove(place)
                    self._target = max(1, self._target - 1)
                    return False
        finally:
            lost.cancel()
            claimed.cancel()
            await asyncio.gather(lost, claimed, return_exceptions=True)

    def _settle(self, place: _Place[P], error: Exception) -> None:
        """Raises the error in the claim that waits for the sandbox."""
        if not place.parked.done():
            place.parked.set_exception(error)
            place.parked.exception()  # marked as retrieved: without a claim, it is logged or raised later

    # ------------------------------------------------------------ when making fails

    def _failed(self, place: _Place[P], error: RolloutError) -> None:
        """Pauses making sandboxes ahead. Claims go on, each raises its own failure."""
        if not place.claimed.is_set():
            log.warning("a warm sandbox: %s: %s", type(error).__name__, error)
        self._settle(place, error)
        self._failures += 1
        if self._pausing is None and not self._closed:
            self._pausing = asyncio.create_task(self._pause(), name="pool pause")

    async def _pause(self) -> None:
        try:
            if self._recovered is not None:
                await self._recovered()
            await asyncio.sleep(self._backoff.pause_s(max(1, self._failures)))
        except Exception as error:  # `recovered` has given up
            self._broken = error
        finally:
            self._pausing = None
        self._fill()
