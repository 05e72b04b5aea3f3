"""`env.eval_split`: which tasks are measured and never trained on.

NAME is another split of the source. `hash:SHARE` holds out that share of `env.split` by a hash of the
task's id alone, so the parts stay when tasks come, go or change their order. Without it nothing is held out
and all of `env.split` is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.tasks.base import Source
from orchestrator.tasks.query import split_query
from orchestrator.tasks.selection import Selection, held_out, select
from orchestrator.types import BadTask, Task

if TYPE_CHECKING:
    from orchestrator.settings.table import EnvSettings

_HASH = "hash:"
_NAMED_SPLIT = re.compile(r"(?<=[?&])split=[^&]*")


def training_tasks(env: EnvSettings) -> Source:
    """All of `env.split` that is not held out, chosen as the settings say. Raises ConfigError.

    The same settings give the same tasks at the same places, so a place is all that a run needs to be
    continued.
    """
    source = _open(env, env.dataset, env.split)
    share = _share(env.eval_split)
    if share is not None:
        source = _part(source, share, held=False)
    elif env.eval_split is not None:
        _other_split(env.dataset, env.split, env.eval_split)
    return _chosen(env, source)


def evaluation_tasks(env: EnvSettings) -> Source:
    """What is held out, or all of `env.split` where nothing is; chosen likewise. Raises ConfigError."""
    share = _share(env.eval_split)
    if env.eval_split is not None and share is None:
        return _chosen(env, _open(env, _other_split(env.dataset, env.split, env.eval_split), env.eval_split))
    source = _open(env, env.dataset, env.split)
    return _chosen(env, source if share is None else _part(source, share, held=True))


def _open(env: EnvSettings, dataset: str, split: str) -> Source:
    return open_tasks(dataset, dataset_path=env.dataset_path, split=split, columns=env.columns or {})


def _chosen(env: EnvSettings, source: Source) -> Source:
    """Filtered, shuffled, cut: after the hold-out, so that `env.max_tasks` counts what is left."""
    selection = Selection(
        levels=frozenset(env.levels),
        tags=frozenset(env.tags),
        shuffle_seed=env.shuffle_seed,
        count=env.max_tasks,
    )
    return source if selection == Selection() else select(source, selection)


def _part(source: Source, share: float, *, held: bool) -> Source:
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
