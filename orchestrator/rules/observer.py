"""Tells the front ends of a run what happens in it: one writer puts it on disk, listeners count and show it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.rules.pools import Choice, GroupResult
from orchestrator.types import Attempt, BadTask, Entry, Group, Member, Record, RolloutPlan

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Puts a run on disk."""

    async def record(self, result: Member | Attempt) -> None:
        """Writes one attempt. It is on disk when this returns."""

    async def record_bad_task(self, task: BadTask, number: int) -> None:
        """Writes a row that no task could be made of. It is on disk when this returns. `number`: the row's place
        in the stream of tasks."""

    async def record_drop(self, group: Group) -> None:
        """Writes why a group was not written or delivered. It is on disk when this returns."""

    async def record_result(self, number: int, result: GroupResult, choice: Choice | None) -> None:
        """Writes what the curriculum goes by. It is on disk when this returns."""

    def served(self, plan: RolloutPlan, started_at: float, one: Entry) -> None:
        """Writes what a rollout under way was served. Soon it is on disk. `started_at`: Unix time."""

    async def under_way(self, plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
        """What a rollout that did not end was served, which such a plan may go on with; None: nothing is known.
        `ids`: of its attempts, the last first."""


class Listener:
    """Is told what happens. A subclass overrides the methods it needs."""

    def begun(self, plan: RolloutPlan, node: str) -> None:
        """A rollout gets a sandbox, on this node of a cluster (empty: on this machine)."""

    def attempt(self, result: Member | Attempt) -> None:
        """An attempt is over and on disk."""

    def group(self, group: Group) -> None:
        """A group is over: written, delivered or dropped."""

    def bad_task(self, task: BadTask) -> None:
        """A row that no task could be made of was met, and is on disk."""

    def node(self, name: str, away: str | None) -> None:
        """A node of the cluster works (None), or rollouts cannot go there, and why."""


@dataclass(slots=True)
class Observer:
    """An attempt counts once it is written: the writer is called first, then the listeners in their order."""

    writer: Writer | None = None
    listeners: list[Listener] = field(default_factory=list)
    say: Callable[[str], None] = log.warning
    notes: list[str] = field(default_factory=list)
    run_path: Path | None = None  # the run directory; None: nothing is recorded
    wanted: int | None = None  # how many groups the run will have; None: nobody knows

    @property
    def output_folder(self) -> Path | None:
        """For the files that rollouts leave; None: sandboxes are not asked for files."""
        return None if self.run_path is None else self.run_path / "output"

    def started(self, plan: RolloutPlan, node: str = "") -> None:
        """A rollout gets a sandbox, on this node."""
        for listener in self.listeners:
            listener.begun(plan, node)

    def node(self, name: str, away: str | None) -> None:
        """A node of the cluster works (None), or rollouts cannot go there, and why."""
        for listener in self.listeners:
            listener.node(name, away)

    def served(self, plan: RolloutPlan, started_at: float, one: Entry) -> None:
        """A rollout was served this."""
        if self.writer is not None:
            self.writer.served(plan, started_at, one)

    async def under_way(self, plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
        """As of `Writer`."""
        return None if self.writer is None else await self.writer.under_way(plan, ids)

    async def recorded(self, result: Member | Attempt) -> None:
        """An attempt is over."""
        if self.writer is not None:
            await self.writer.record(result)
        for listener in self.listeners:
            listener.attempt(result)

    async def group(self, group: Group) -> None:
        """A group is over."""
        if self.writer is not None and group.dropped is not None:
            await self.writer.record_drop(group)
        for listener in self.listeners:
            listener.group(group)

    async def result(self, number: int, result: GroupResult, choice: Choice | None) -> None:
        """What the curriculum goes by, of the group of this number, and why that was drawn."""
        if self.writer is not None:
            await self.writer.record_result(number, result, choice)

    async def bad_task(self, task: BadTask, number: int) -> None:
        """A row that no task could be made of was met. `number`: its place in the stream of tasks."""
        if self.writer is not None:
            await self.writer.record_bad_task(task, number)
        for listener in self.listeners:
            listener.bad_task(task)
