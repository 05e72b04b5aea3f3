"""What every kind of tasks is read as: a finite sequence that can be read again, in the same order. And our names
of a row's columns, for data sets that have others."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from orchestrator.types import BadTask, Task

COLUMNS = (
    *("question", "answer", "task_id", "files", "level", "metadata", "scorer", "image", "dockerfile", "limits"),
    *("workspace", "root", "cwd", "user", "env", "grader"),
)

Columns = Mapping[str, str]  # our name → the data set's
NONE: Columns = {}


class BadRow(Exception):
    """No task can be made of a row. Becomes a BadTask; not raised outside this package."""


@dataclass(frozen=True, slots=True)
class Source:
    """`name`: where the tasks come from, for display. `read`: reads them from the start. `size`: says how many
    there are without reading them; None: reading is how it is known. `notes`: lines to say before a run, which may
    take half a minute to find.

    A row that no task can be made of comes as BadTask; it raises nothing. Two tasks never have the same id. Tasks
    are streamed: only a set of hashes of ids, eight bytes each, grows with the source.
    """

    name: str
    read: Callable[[], Iterator[Task | BadTask]]
    size: Callable[[], int | None] | None = None
    notes: Callable[[], tuple[str, ...]] = tuple

    def __iter__(self) -> Iterator[Task | BadTask]:
        hashes: set[bytes] = set()
        for task in self.read():
            if isinstance(task, Task):
                text = task.task_id.encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(text, digest_size=8).digest()
                if digest in hashes:
                    yield BadTask(task.task_id, "another task before it has the same task_id")
                    continue
                hashes.add(digest)
            yield task

    def count(self, longest_s: float = 2.0) -> int | None:
        """How many tasks there are, for progress; None: it takes longer to find out. Blocks. Raises what reading
        raises."""
        if self.size is not None:
            return self.size()
        count, ends = 0, time.monotonic() + longest_s
        for number, task in enumerate(self):
            count += isinstance(task, Task)
            if number % 64 == 0 and time.monotonic() > ends:
                return None
        return count

    def named(self, ids: Set[str]) -> dict[str, Task | BadTask]:
        """The tasks with these ids, as far as there are any."""
        matches: dict[str, Task | BadTask] = {}
        for task in self:
            if task.task_id in ids:
                matches.setdefault(task.task_id, task)
                if len(matches) == len(ids):
                    break
        return matches


def renamed(row: object, columns: Columns) -> object:
    """The row with our names. Anything but a mapping is returned as it is, and refused later."""
    if not columns or not isinstance(row, Mapping):
        return row
    ours_to_value: dict[Any, Any] = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {**row, **ours_to_value}
