"""`env.eval_split`: which tasks are measured and never trained on.

NAME is another split of the source. `hash:SHARE` holds out that share of `env.split` by a hash of the
task's id alone, so the parts stay when tasks come, go or change their order. Without it nothing is held out
and all of `env.split` is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.tasks.base import TaskSource
from orchestrator.tasks.query import split_query
from orchestrator.tasks.selection import held_out
from orchestrator.tasks.source import Source
from orchestrator.types import BadTask, Task

_HASH = "hash:"
_NAMED_SPLIT = re.compile(r"(?<=[?&])split=[^&]*")


def training_tasks(dataset: str, *, dataset_path: Path, split: str, eval_split: str | None) -> TaskSource:
    """All of `split` that is not held out. Raises ConfigError, as `open_tasks` does."""
    source = open_tasks(dataset, dataset_path=dataset_path, split=split)
    share = _share(eval_split)
    if share is not None:
        return _part(source, share, held=False)
    if eval_split is not None:
        _other_split(dataset, split, eval_split)
    return source


def evaluation_tasks(dataset: str, *, dataset_path: Path, split: str, eval_split: str | None) -> TaskSource:
    """What is held out, or all of `split` where nothing is. Raises ConfigError, as `open_tasks` does."""
    share = _share(eval_split)
    if eval_split is not None and share is None:
        return open_tasks(_other_split(dataset, split, eval_split), dataset_path=dataset_path, split=eval_split)
    source = open_tasks(dataset, dataset_path=dataset_path, split=split)
    return source if share is None else _part(source, share, held=True)


def _part(source: TaskSource, share: float, *, held: bool) -> TaskSource:
    """A row no task could be made of has no id to go by: it is reported in both parts."""

    def read() -> Iterator[Task | BadTask]:
        return (t for t in source if isinstance(t, BadTask) or held_out(t.task_id, share) == held)

    kept = f"the {share:g} held out by hash" if held else f"without the {share:g} held out by hash"
    return Source(f"{source.name}, {kept}", read)


def _other_split(dataset: str, split: str, eval_split: str) -> str:
    """The dataset to open for the named split. Raises ConfigError where there is no such thing."""
    kind, _, rest = dataset.partition(":")
    if kind not in ("gaia", "hf"):
        raise ConfigError(f"env.eval_split: {kind}: has no splits; hold a part out with hash:SHARE, like hash:0.1")
    if kind == "hf":
        split = split_query(rest, "hf")[1].get("split", split)
    if split == eval_split:
        raise ConfigError(f"env.eval_split: {eval_split} is the split to train on; name another, or hash:SHARE")
    return _NAMED_SPLIT.sub(f"split={eval_split}", dataset) if kind == "hf" else dataset


def _share(eval_split: str | None) -> float | None:
    if eval_split is None or not eval_split.startswith(_HASH):
        return None
    return float(eval_split.removeprefix(_HASH))
