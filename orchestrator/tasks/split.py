"""`env.eval_split`: which tasks are for evaluation and never trained on.

NAME is another split of the source. `hash:SHARE` holds out that share of `env.split` by a hash of the task's id:
adding, removing or reordering tasks does not change it. Without `env.eval_split` nothing is held out, and all of
`env.split` is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.tasks.base import Source
from orchestrator.tasks.checks import checks_file, only_checked
from orchestrator.tasks.query import split_query
from orchestrator.tasks.selection import held_out, select
from orchestrator.types import BadTask, Task

if TYPE_CHECKING:
    from orchestrator.settings.tasks import TaskSettings

_HASH = "hash:"
_NAMED_SPLIT = re.compile(r"(?<=[?&])split=[^&]*")


class Parts(NamedTuple):
    """`full`: all tasks of a split. `part`: those that are trained, or those that are held out. `checked`: of
    these, those that passed their check, if only they are taken. `selected`: of these, what the filters leave."""

    full: Source
    part: Source
    checked: Source
    selected: Source


def training_parts(env: TaskSettings) -> Parts:
    """Of `env.split`, without what is held out. Raises ConfigError."""
    if env.eval_split is not None and held_share(env) is None:
        _other_split(env.dataset, env.split, env.eval_split)
    return _parts(env, env.dataset, env.split, evaluation=False)


def evaluation_parts(env: TaskSettings) -> Parts:
    """Of the split that is held out, or of `env.split`. Raises ConfigError."""
    if env.eval_split is None or held_share(env) is not None:
        return _parts(env, env.dataset, env.split, evaluation=True)
    dataset = _other_split(env.dataset, env.split, env.eval_split)
    return _parts(env, dataset, env.eval_split, evaluation=True)


def training_tasks(env: TaskSettings) -> Source:
    """The tasks of `env.split` that are not held out, selected by the settings. Raises ConfigError.

    The same settings give the same tasks at the same places, so a resumed run knows its tasks by their places.
    """
    return training_parts(env).selected


def evaluation_tasks(env: TaskSettings) -> Source:
    """The held-out tasks, or all of `env.split` if none are; selected by the settings. Raises ConfigError."""
    return evaluation_parts(env).selected


def tasks_of(env: TaskSettings, run: Mapping[str, Any]) -> Source:
    """The tasks that a run chose from, by its run.json: held-out ones for `evaluate`, and what branches from it.
    Raises ConfigError."""
    held = run.get("command") == "evaluate" or run.get("held_out") is True
    return evaluation_tasks(env) if held else training_tasks(env)


def held_share(env: TaskSettings) -> float | None:
    """The share that `env.eval_split` holds out by hash; None: it does not."""
    text = env.eval_split or ""
    return float(text.removeprefix(_HASH)) if text.startswith(_HASH) else None


def _parts(env: TaskSettings, dataset: str, split: str, *, evaluation: bool) -> Parts:
    """Filters, shuffles and cuts after the hold-out, so that `env.max_tasks` counts what is left."""
    full = open_tasks(
        dataset,
        dataset_path=env.dataset_path,
        split=split,
        columns=env.columns or {},
        mcp_servers=env.mcp_server_names,
    )
    share = held_share(env)
    part = full if share is None else _part(full, share, evaluation=evaluation)
    checked = only_checked(part, checks_file(dataset)) if env.only_checked_tasks else part
    selected = select(
        checked, levels=env.levels, tags=env.tags, shuffle_seed=env.shuffle_seed, count=env.max_tasks
    )
    return Parts(full, part, checked, selected)


def _part(source: Source, share: float, *, evaluation: bool) -> Source:
    """One part of the source. A BadTask has no reliable id, so it is in both parts."""

    def read() -> Iterator[Task | BadTask]:
        return (t for t in source if isinstance(t, BadTask) or held_out(t.task_id, share) == evaluation)

    description = f"the {share:g} held out by hash" if evaluation else f"without the {share:g} held out by hash"
    size = None if source.size is None else lambda: None
    return replace(source, name=f"{source.name}, {description}", read=read, size=size)


def _other_split(dataset: str, split: str, eval_split: str) -> str:
    """The dataset to open for the split `eval_split`. Raises ConfigError if the source has no other splits."""
    kind, _, rest = dataset.partition(":")
    if kind not in ("gaia", "harbor", "hf"):
        raise ConfigError(f"env.eval_split: {kind}: has no splits; hold a part out with hash:SHARE, like hash:0.1")
    if kind == "hf":
        split = split_query(rest, "hf")[1].get("split", split)
    if split == eval_split:
        raise ConfigError(f"env.eval_split: {eval_split} is the split to train on; name another, or hash:SHARE")
    return _NAMED_SPLIT.sub(f"split={eval_split}", dataset) if kind == "hf" else dataset
