"""The parents that sandboxes are forked from: started when one is needed, renewed, ended.

A parent is a container like a sandbox, but without an image, a task, a channel and a place to write to: it has the
runtime, which is the same for all images. Its capabilities are those of a user namespace that no other parent has.
Where sandboxes are to find modules of their image imported, they have parents of their own, which import these.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import LaunchError, RolloutError
from orchestrator.launch.oci.fork_bundles import PARENT_BYTES
from orchestrator.launch.oci.runtime import Unfit
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import SandboxSpec

log = logging.getLogger(__name__)

MOST_FORKS = 900  # it has a descriptor of each that lives, and may have 1,024
MOST_S = 1800.0
MOST_KINDS = 4  # with parents at a time: each kind has modules of its own in memory
MOST_UNREADY = 2  # sandboxes of a kind in a row: by default a rollout has a third try
_AGAIN = Backoff(first_s=300.0, most_s=3600.0)  # each try may cost a sandbox over a minute


@dataclass
class _Parent:
    name: str
    kind: SandboxSpec | None
    begun_s: float
    forks: int = 0
    live: int = 0
    has_ended: bool = False
    has_failed: bool = False  # a sandbox that was forked from it did not get ready
    is_trial: bool = False  # of a kind whose sandboxes did not get ready before; until one does

    def ended(self, status: int, output: str) -> None:
        """Nothing more can be forked from it."""
        self.has_ended = True

    def lose(self, error: RolloutError) -> None:
        """Nor if nobody watches it any more."""
        self.has_ended = True


@dataclass
class _Failure:
    """Of the parents of a kind: how many in a row, and why the last one did. `until_s`: when to try again.
    `of_forks`: it started, and what was forked from it did not get ready."""

    why: str
    count: int
    until_s: float
    of_forks: bool


class Parents:
    """`start` makes a parent of a kind and `remove` ends one, by name; both may raise RolloutError. A kind is the
    sandboxes that are to find modules imported; None: all others."""

    def __init__(
        self,
        start: Callable[[str, SandboxSpec | None], Awaitable[object]],
        remove: Callable[[str], Awaitable[object]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._remove, self._clock = start, remove, clock
        self._newest: dict[SandboxSpec | None, _Parent] = {}  # the last used last
        self.all: dict[str, _Parent] = {}  # by name
        self.forks = 0  # so far, of all
        self._failures: dict[SandboxSpec, _Failure] = {}
        self._unready: Counter[SandboxSpec] = Counter()  # in a row
        self._starting: defaultdict[SandboxSpec | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._told: set[tuple[SandboxSpec, str]] = set()  # why modules are not shared

    async def lease_for(self, spec: SandboxSpec) -> str:
        """As `lease`: a parent with the modules of the sandbox, if one has them. Raises LaunchError."""
        if spec.preload and not spec.layers:
            try:
                return await self.lease(kind := kind_of(spec))
            except LaunchError as error:
                if (cause := (kind, str(error))) not in self._told:
                    self._told.add(cause)
                    line = "each sandbox of %s imports env.program_preload for itself: %s"
                    log.warning(line, spec.image, error)
        return await self.lease()

    async def lease(self, kind: SandboxSpec | None = None) -> str:
        """The name of a parent, until `release`. Raises LaunchError."""
        surplus: list[_Parent] = []
        if kind is not None and (failure := self._failures.get(kind)) is not None and self._is_tried(kind):
            raise LaunchError(failure.why)
        async with self._starting[kind]:
            parent = self._newest.get(kind)
            if parent is None or parent.has_ended or self._is_old(parent):
                try:
                    renewed = await self._started(kind)
                except LaunchError:
                    if parent is None or parent.has_ended:
                        raise
                else:
                    surplus += [] if parent is None else [parent]
                    parent = renewed
            parent.forks += 1
            self.forks += 1
            parent.live += 1  # before anything else is waited for: others end parents that nobody has
            self._newest.pop(kind, None)
            self._newest[kind] = parent
        while len(self._newest) > MOST_KINDS:
            surplus.append(self._newest.pop(next(iter(self._newest))))
        try:
            await uninterrupted(self._end_unused(surplus))
        except BaseException:
            await uninterrupted(self.release(parent.name))
            raise
        return parent.name

    async def release(self, name: str, why_unready: str | None = None) -> None:
        """What was forked from it has been removed. Ends a parent that is not the newest with its last one.
        `why_unready`: why the sandbox did not get ready; empty: it did; None: nobody knows."""
        parent = self.all[name]
        parent.live -= 1
        if parent.kind is not None and why_unready is not None:
            self._judge(parent, parent.kind, why_unready)
        if not parent.live and parent is not self._newest.get(parent.kind):
            await self._end(parent)

    def _judge(self, parent: _Parent, kind: SandboxSpec, why_unready: str) -> None:
        """Sandboxes of a kind of which none gets ready do without a parent that has their modules."""
        if not why_unready:
            del self._unready[kind]
            parent.is_trial = False
            if kind in self._failures and self._failures[kind].of_forks:
                del self._failures[kind]
        elif not (parent.has_failed and parent.has_ended):  # its end costs all that are starting, and counts once
            parent.has_failed = True
            self._unready[kind] += 1
            count = self._unready[kind]
            others = 0 if parent.has_ended else parent.live
            if parent is self._newest.get(kind) and (
                parent.is_trial or (count >= MOST_UNREADY and count > others)
            ):
                del self._newest[kind]
                self._fail(kind, f"what is forked with it does not get ready: {why_unready}", of_forks=True)

    def _is_tried(self, kind: SandboxSpec) -> bool:
        """Again, after a failure. One sandbox is enough."""
        newest = self._newest.get(kind)
        return self._starting[kind].locked() or (newest is not None and newest.is_trial and newest.live > 0)

    def _fail(self, kind: SandboxSpec, why: str, *, of_forks: bool = False, is_final: bool = False) -> None:
        before = self._failures.get(kind)
        count = 1 if before is None else before.count + 1
        pause_s = math.inf if is_final else _AGAIN.pause_s(count)
        self._failures[kind] = _Failure(why, count, self._clock() + pause_s, of_forks)

    def _is_old(self, parent: _Parent) -> bool:
        return parent.forks >= MOST_FORKS or self._clock() - parent.begun_s > MOST_S

    async def _started(self, kind: SandboxSpec | None) -> _Parent:
        """Where modules are to be imported, no failure is repeated at once: sandboxes can do without."""
        if kind is None:
            return await self._tried(None)
        failure = self._failures.get(kind)
        if failure is not None and self._clock() < failure.until_s:
            raise LaunchError(failure.why)
        try:
            parent = await self._tried(kind)
        except LaunchError as error:
            self._fail(kind, str(error), is_final=isinstance(error, Unfit))
            raise
        if failure is not None and failure.of_forks:
            parent.is_trial = True
        else:
            self._failures.pop(kind, None)
        return parent

    async def _tried(self, kind: SandboxSpec | None) -> _Parent:
        name = f"parent-{secrets.token_hex(8)}"
        parent = self.all[name] = _Parent(name, kind, self._clock())
        try:
            await self._start(name, kind)
        except BaseException:
            await uninterrupted(self._end(parent))
            raise
        return parent

    async def _end_unused(self, surplus: Sequence[_Parent]) -> None:
        for parent in surplus:
            if not parent.live and parent.name in self.all:
                await self._end(parent)

    async def _end(self, parent: _Parent) -> None:
        del self.all[parent.name]
        await self._remove(parent.name)


def kind_of(spec: SandboxSpec) -> SandboxSpec:
    """What modules can see of it: sandboxes that differ in memory and storage alone have one parent."""
    storage = 1 if spec.is_writable else 0
    return replace(spec, memory_bytes=PARENT_BYTES, storage_bytes=storage, storage_inodes=storage)
