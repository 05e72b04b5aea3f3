"""What the front ends of a run hear: where its attempts are written, who counts them, who shows them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.types import Attempt, BadTask, Member, RolloutPlan

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Puts a run on disk."""

    async def record(self, result: Member | Attempt) -> None:
        """One attempt, on disk when this returns."""

    async def record_bad_task(self, task: BadTask, number: int) -> None:
        """A row that no task could be made of, on disk when this returns. `number`: its place in the stream."""


class Listener:
    """Hears what happens. A subclass overrides what it wants to hear."""

    def begun(self, plan: RolloutPlan) -> None:
        """A rollout gets a sandbox."""

    def attempt(self, result: Member | Attempt) -> None:
        """An attempt is over, and on disk."""

    def bad_task(self, task: BadTask) -> None:
        """A row that no task could be made of, and it is on disk."""


@dataclass(slots=True)
class Observer:
    """An attempt counts when it is written: the writer comes first, then the listeners in their order."""

    writer: Writer | None = None
    listeners: list[Listener] = field(default_factory=list)
    say: Callable[[str], None] = log.warning
    notes: list[str] = field(default_factory=list)
    output_folder: Path | None = None  # for the files that rollouts leave; None: they are not asked for

    def started(self, plan: RolloutPlan) -> None:
        """A rollout gets a sandbox."""
        for listener in self.listeners:
            listener.begun(plan)

    async def recorded(self, result: Member | Attempt) -> None:
        """An attempt is over."""
        if self.writer is not None:
            await self.writer.record(result)
        for listener in self.listeners:
            listener.attempt(result)

    async def bad_task(self, task: BadTask, number: int) -> None:
        """A row that no task could be made of. `number`: its place in the stream."""
        if self.writer is not None:
            await self.writer.record_bad_task(task, number)
        for listener in self.listeners:
            listener.bad_task(task)
