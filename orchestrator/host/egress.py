"""What rollouts reach of the outside: the border of a run, opened anew for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time

from orchestrator.border.bodies import Bodies
from orchestrator.border.border import Border
from orchestrator.border.keys import read_keys
from orchestrator.border.outside import BorderLimits, Outside
from orchestrator.border.reach import Reach
from orchestrator.border.recorded import Cache, Playback, Request, answered
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.host.base import Provision
from orchestrator.rules.egress import EGRESS_FOLDER, Rules, entry_of
from orchestrator.run.excerpts import read_crossings
from orchestrator.run.files import record_of
from orchestrator.run.lenient import json_lines
from orchestrator.run.lines import text_at
from orchestrator.settings.egress import EgressSettings
from orchestrator.types import NO_WORLD, Crossing, RolloutPlan, Task, World

# What one rollout reaches, until the block is left.
Opening = Callable[[RolloutPlan, Provision], AbstractAsyncContextManager[World]]


def no_world(plan: RolloutPlan, provision: Provision) -> AbstractAsyncContextManager[World]:
    """Nothing leaves."""
    return nullcontext(NO_WORLD)


def open_egress(settings: EgressSettings) -> Opening:
    """What rollouts of a run may ask for. Blocks. Raises ConfigError, EnvironmentUnusable."""
    return RunEgress(settings).opened if settings.egress else no_world


class Recorded:
    """What the rollouts of a recorded run were answered. A rollout of the same id and task gets its own answers,
    in their order; any other one those that any of them got."""

    def __init__(self, run: Path) -> None:
        """Blocks. Raises ConfigError."""
        record = record_of(run)
        if record is None:
            raise ConfigError(f"env.egress: {run} holds no record of a run")
        self._record, self._places = record, dict[tuple[str, str], int]()
        self._others = dict[Request, Crossing]()
        for offset, line in json_lines(record):
            if line is None or not line.get("crossings"):
                continue
            rollout_id, task_id, crossings = self._read(offset)
            self._places[rollout_id, task_id] = offset
            for crossing in crossings:
                if (request := answered(crossing)) is not None:
                    self._others.setdefault(request, crossing)
        if not self._places:
            raise ConfigError(f"env.egress: no rollout of {run} asked anything of the outside: nothing to replay")
        try:
            self._bodies = Bodies(run / EGRESS_FOLDER)
        except OSError as error:
            raise ConfigError(f"env.egress: {run / EGRESS_FOLDER}: {error.strerror}") from None

    def playback(self, rollout_id: str, task_id: str) -> Playback:
        """For a rollout. Blocks. Raises ConfigError."""
        if (place := self._places.get((rollout_id, task_id))) is None:
            return Playback((), self._bodies, self._others)
        return Playback(self._read(place)[2], self._bodies)

    def _read(self, place: int) -> tuple[str, str, tuple[Crossing, ...]]:
        try:
            return read_crossings(text_at(self._record, place))
        except (OSError, ValueError) as error:
            raise ConfigError(f"env.egress: {self._record} cannot be read: {error}") from None


class RunEgress:
    """Of all rollouts of a run on this machine."""

    def __init__(self, settings: EgressSettings) -> None:
        """Blocks. Raises ConfigError, EnvironmentUnusable."""
        try:
            from orchestrator.border.authority import Authority
        except ImportError as error:
            raise EnvironmentUnusable(f"env.egress needs the package cryptography: {error}") from None
        self._authority = Authority()
        self._reach = Reach()
        self._rules = Rules(settings.egress_entries)
        self._gives_tasks_theirs = settings.gives_tasks_theirs
        self._keys = read_keys(settings.key_entries)
        self._limits = BorderLimits(
            settings.max_egress_requests,
            settings.max_egress_bytes,
            settings.egress_timeout,
            settings.max_egress_streams,
        )
        self._kept, self._caches = settings.egress_kept, settings.egress_cache
        self._recorded = None if settings.egress_replay is None else Recorded(settings.egress_replay)
        self._outsides = dict[Path | None, asyncio.Task[Outside]]()

    @asynccontextmanager
    async def opened(self, plan: RolloutPlan, provision: Provision) -> AsyncIterator[World]:
        """For one rollout. What it asks is told to `provision` as soon as it has ended."""
        outside = await self._outside(provision.run_folder)
        prefix, playback = plan.prefix, None
        if self._recorded is not None:
            playback = await asyncio.to_thread(self._recorded.playback, plan.rollout_id, plan.task.task_id)
        elif prefix is not None and prefix.crossings:
            bodies = await self._bodies_of(plan, outside.bodies)
            playback = Playback(prefix.crossings, bodies, goes_on=bool(prefix.continued))
        began_at = time() if prefix is None else prefix.started_at
        told: Callable[[Crossing], None] = partial(provision.served, began_at)
        border = Border(self.rules_of(plan.task), outside, self._limits, playback=playback, added=told)

        def keep_time(elapsed_s: Callable[[], float]) -> None:
            border.journal.elapsed_s = elapsed_s

        def notes() -> tuple[str, ...]:
            more = border.journal.left_out
            lines = [f"{more} requests are not on record: they came over the limit"] if more else []
            if playback is not None and playback.missed:
                lines.append(f"{playback.missed} requests were not on record")
            return tuple(lines)

        yield World((border,), self._authority.certificate, lambda: border.crossings, notes, keep_time)

    def rules_of(self, task: Task) -> Rules:
        """What rollouts of the task may ask. Its hosts were checked when it was read."""
        if not (self._gives_tasks_theirs and task.network):
            return self._rules
        theirs = (replace(entry_of(raw), of_task=True) for raw in task.network)
        return Rules((*self._rules.entries, *theirs))

    async def _bodies_of(self, plan: RolloutPlan, ours: Bodies) -> Bodies:
        """Those of the run that the rollout's beginning is of."""
        branch = plan.prefix.branch if plan.prefix else None
        if branch is None or not branch.run:
            return ours
        return await asyncio.to_thread(Bodies, Path(branch.run) / EGRESS_FOLDER)

    async def _outside(self, run: Path | None) -> Outside:
        """Of the run in this directory. None: bodies are hashed, and not kept."""
        if run not in self._outsides:
            self._outsides[run] = asyncio.create_task(self._opened(run), name="egress")
        return await asyncio.shield(self._outsides[run])

    async def _opened(self, run: Path | None) -> Outside:
        folder = None if run is None else run / EGRESS_FOLDER
        try:
            bodies = await asyncio.to_thread(Bodies, folder, self._kept)
        except OSError as error:
            raise ConfigError(f"env.egress: {folder} cannot be used: {error.strerror}") from None
        cache = Cache(bodies) if self._caches else None
        live = self._recorded is None
        return Outside(self._reach, self._authority.context, bodies, self._keys, cache, live)
