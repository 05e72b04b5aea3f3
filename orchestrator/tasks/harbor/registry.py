"""registry.json: data sets as lists of task folders beside it, as in a checkout of the repository it names."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError
from orchestrator.tasks.lines import check_readable

REGISTRY = "registry.json"
MAX_BYTES = 64 << 20
_FLAG = "env.dataset"
_USUAL_SPLIT = "validation"  # what env.split is where nobody sets it


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a task is. `refusal`: why that is not looked at; empty: it is."""

    path: Path
    refusal: str = ""


def read_registry(file: Path, split: str) -> list[Entry]:
    """The tasks of the data set `split`, or of all where none has the name that is meant without a choice. Each
    folder once. Raises ConfigError, OSError."""
    check_readable(file, _FLAG)
    if file.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{_FLAG}: {file} has more than {MAX_BYTES >> 20} MiB")
    try:
        datasets = [one for one in orjson.loads(file.read_bytes()) if isinstance(one["tasks"], list)]
        names = {f"{one['name']}": None for one in datasets}
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{_FLAG}: {file} is no registry of data sets, each with name and tasks") from None
    chosen = [one for one in datasets if one["name"] == split]
    if not chosen and split != _USUAL_SPLIT:
        known = ", ".join(ascii(name)[1:-1][:60] for name in list(names)[:8])
        raise ConfigError(f"env.split: {split} is no data set of {file}; it has {known}")
    root = file.parent.resolve()
    entries = (_entry(root, task) for one in chosen or datasets for task in one["tasks"])
    return list({entry.path: entry for entry in entries}.values())


def _entry(root: Path, task: Any) -> Entry:
    path = task.get("path") if isinstance(task, Mapping) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return Entry(root / "task", f"{REGISTRY} says no path for it")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    place = root.joinpath(*parts)
    if path.startswith("/") or ".." in parts or not parts:
        return Entry(place, f"{REGISTRY}: {ascii(path)[:100]} leads out of its folder")
    try:
        place.resolve().relative_to(root)
    except (ValueError, OSError, RuntimeError):
        return Entry(place, f"{REGISTRY}: {ascii(path)[:100]} leads out of its folder")
    if not os.path.isdir(place):  # a name may be longer than any file has
        origin = task.get("git_url")
        cure = f": clone {ascii(origin)[1:-1][:100]} there" if isinstance(origin, str) else ""
        return Entry(place, f"{REGISTRY}: {ascii(path)[:100]} is not beside it{cure}")
    return Entry(place)
