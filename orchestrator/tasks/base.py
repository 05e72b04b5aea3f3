"""What every source of tasks offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from orchestrator.types import BadTask, Task


class TaskSource(Protocol):
    """A finite sequence of tasks that can be read more than once, always in the same order."""

    @property
    def name(self) -> str:
        """For people: where the tasks come from."""

    def __iter__(self) -> Iterator[Task | BadTask]:
        """From the start. A row no task can be made of comes as BadTask; nothing is raised for it."""
