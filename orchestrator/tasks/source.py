"""The class of all task sources. It makes sure that no two tasks have the same id."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.types import BadTask, Task


class BadRow(Exception):
    """No task can be made of a row. Becomes a BadTask; not raised outside this package."""


@dataclass(frozen=True, slots=True)
class Source:
    """A TaskSource around a function that reads from the start each time it is called.

    Tasks are streamed. Only a set of hashes of ids, eight bytes each, grows with the source.
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
