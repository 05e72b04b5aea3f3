"""The one shape of every task source, and what each of them owes: no two tasks of one id."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.types import BadTask, Task


class BadRow(Exception):
    """Why no task can be made of a row. Becomes a BadTask; never leaves this package."""


@dataclass(frozen=True, slots=True)
class Source:
    """A TaskSource around a function that reads from the start each time it is called.

    Tasks stream through. What grows with the source is the set of ids seen, eight bytes of each.
    """

    name: str
    read: Callable[[], Iterator[Task | BadTask]]

    def __iter__(self) -> Iterator[Task | BadTask]:
        seen: set[bytes] = set()
        for task in self.read():
            if isinstance(task, Task):
                text = task.task_id.encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(text, digest_size=8).digest()
                if digest in seen:
                    yield BadTask(task.task_id, "another task before it has the same task_id")
                    continue
                seen.add(digest)
            yield task
