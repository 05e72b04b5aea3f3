"""`harbor:PATH`: a folder of Harbor's tasks, one task's folder, or a registry.json with the tasks beside it."""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import shown
from orchestrator.tasks.base import Source
from orchestrator.tasks.harbor.refusal import UNREADABLE, told
from orchestrator.tasks.harbor.registry import REGISTRY, Entry, read_registry
from orchestrator.tasks.harbor.task import Reading, read_folder
from orchestrator.types import BadTask, Task

_FLAG = "env.dataset"
_LONGEST_S = 30.0  # of looking at all tasks before a run
_AT_ONCE, _BATCH = 16, 64
_MOST_KEYS = 8


def harbor_tasks(path: Path, *, name: str, split: str, mcp_servers: Collection[str] = ()) -> Source:
    """The source. Its tasks come in the order of their folders' names, or of the registry's. `split`: a data set
    of a registry. `mcp_servers`: names of the operator's. Raises ConfigError."""
    entries = list(_entries(path, split))
    if not entries:
        raise ConfigError(
            f"{_FLAG}: {shown(str(path))} holds no task: neither it nor a folder in it has a task.toml"
        )

    def read() -> Iterator[Task | BadTask]:
        return (_reading(entry, name, mcp_servers).task for entry in entries)

    return Source(name, read, notes=lambda: _notes(_at_once(entries, name, mcp_servers)))


def _entries(path: Path, split: str) -> Iterable[Entry]:
    try:
        if path.suffix == ".json" and path.is_file():
            return read_registry(path, split)
        if (path / "task.toml").exists():
            return [Entry(path.resolve())]
        if (path / REGISTRY).exists():
            return read_registry(path / REGISTRY, split)
        with os.scandir(path) as listing:
            names = sorted(entry.name for entry in listing if entry.is_dir() or entry.is_symlink())
        root = path.resolve()
        return [Entry(root / name) for name in names if os.path.lexists(root / name / "task.toml")]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{_FLAG}: cannot read {shown(str(path))}: {reason}; name a folder of tasks") from error


def _reading(entry: Entry, source: str, mcp_servers: Collection[str]) -> Reading:
    if entry.refusal:
        return Reading(BadTask(entry.path.name, entry.refusal))
    return read_folder(entry.path, source, mcp_servers)


def _at_once(entries: list[Entry], source: str, mcp_servers: Collection[str]) -> Iterator[Reading]:
    """In order, some at a time: on a busy disk each has to be waited for."""
    with ThreadPoolExecutor(_AT_ONCE, "harbor") as pool:
        for first in range(0, len(entries), _BATCH):
            yield from pool.map(_reading, entries[first : first + _BATCH], repeat(source), repeat(mcp_servers))


def _notes(readings: Iterator[Reading]) -> tuple[str, ...]:
    """How many tasks can be run and why others cannot; which keys nobody reads. All tasks are looked at, as far as
    that takes no longer than is waited for."""
    total, cut, ends = 0, False, time.monotonic() + _LONGEST_S
    needs, unknown, ids = Counter[str](), Counter[str](), set[str]()
    networks = 0
    for reading in readings:
        total += 1
        unknown.update(reading.unknown)
        if isinstance(reading.task, BadTask):
            needs[reading.need] += 1
        elif reading.task.task_id in ids:
            needs[UNREADABLE] += 1
        else:
            ids.add(reading.task.task_id)
            networks += bool(reading.task.notes)
        if cut := time.monotonic() > ends:
            break
    notes = [told(total, needs, at_least=cut)]
    if networks:
        notes.append(f"{networks} of these tasks ask for a network: they have what env.egress gives")
    if unknown:
        keys = [f"{key} ({count} tasks)" for key, count in unknown.most_common(_MOST_KEYS)]
        more = f" and {len(unknown) - _MOST_KEYS} more" if len(unknown) > _MOST_KEYS else ""
        notes.append(f"keys of task.toml that are not read: {', '.join(keys)}{more}")
    return tuple(notes)
