"""Selects and orders the tasks of a source: pure functions on streams of tasks.

A BadTask passes every filter, as it has no level and must be reported, and is not counted.
"""

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from orchestrator.tasks.base import Source
from orchestrator.types import BadTask, Task

SHUFFLE_WINDOW = 10_000

Tasks = Iterable[Task | BadTask]


def select(
    source: Source,
    *,
    levels: Collection[str] = (),
    tags: Collection[str] = (),
    shuffle_seed: int | None = None,
    count: int | None = None,
) -> Source:
    """The source filtered, shuffled and cut, in this order; it is the same each time it is read. Empty and None
    change nothing."""
    if not (levels or tags) and shuffle_seed is None and count is None:
        return source

    def fits(task: Task | BadTask) -> bool:
        if isinstance(task, BadTask):
            return True
        return (not levels or task.level in levels) and (not tags or not tags_of(task).isdisjoint(tags))

    def read() -> Iterator[Task | BadTask]:
        tasks: Iterator[Task | BadTask] = filter(fits, source)
        return _first(tasks if shuffle_seed is None else shuffled(tasks, shuffle_seed), count)

    def size() -> int | None:
        total = source.size() if source.size is not None and not (levels or tags) else None
        return total if total is None or count is None else min(total, count)

    return replace(source, read=read, size=None if source.size is None else size)


def tags_of(task: Task) -> frozenset[str]:
    """The texts in the task's `metadata["tags"]`."""
    tags = task.metadata.get("tags", ())
    return (
        frozenset(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list | tuple) else frozenset()
    )


def shuffled(tasks: Tasks, seed: int, window: int = SHUFFLE_WINDOW) -> Iterator[Task | BadTask]:
    """A seeded shuffle in bounded memory: exact up to `window` tasks, within a moving window beyond."""
    draw = random.Random(seed)  # noqa: S311 - an order, not a secret
    stream = iter(tasks)
    window_tasks = list(islice(stream, window))
    draw.shuffle(window_tasks)
    for task in stream:
        place = draw.randrange(window)
        window_tasks[place], task = task, window_tasks[place]
        yield task
    draw.shuffle(window_tasks)
    yield from window_tasks


def _first(tasks: Tasks, count: int | None) -> Iterator[Task | BadTask]:
    """The tasks up to the `count`th good one, which is included."""
    good = 0
    for task in tasks:
        if count is not None and good >= count:
            return
        good += isinstance(task, Task)
        yield task


def held_out(task_id: str, fraction: float, seed: int = 0) -> bool:
    """Whether a task belongs to the evaluation part: blake2b(seed, task_id) as a share of 1 < fraction.

    It depends on nothing else, so adding, removing or reordering tasks does not change the split.
    """
    text = f"{seed}\0{task_id}".encode("utf-8", "surrogatepass")
    share = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    return share < fraction
