"""What every source of tasks offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from orchestrator.types import BadTask, Task


class TaskSource(Protocol):
    """A finite sequence of tasks that can be read more than once, always in the same order."""

    @property
    def name(self) -> str:
        """Where the tasks come from, for display."""

    def __iter__(self) -> Iterator[Task | BadTask]:
        """All tasks from the start. A row that no task can be made of comes as BadTask; it raises nothing."""
