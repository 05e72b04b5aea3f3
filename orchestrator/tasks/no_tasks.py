"""Refuses a run that would have nothing to do, with the reason: an empty file, other names of columns, filters
that fit nothing, a share that holds nothing out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import Source
from orchestrator.tasks.selection import held_out, tags_of
from orchestrator.tasks.split import Parts, evaluation_parts, held_share, training_parts
from orchestrator.types import BadTask, Task

if TYPE_CHECKING:
    from orchestrator.settings.tasks import TaskSettings

_MAX_HELD = 10_000  # bad tasks before the first good one that are kept for the first reading
_LONGEST_S = 2.0  # of looking for a held-out task
_MAX_SHOWN = 8


def tasks_to_train(env: TaskSettings) -> Source:
    """`training_tasks`, at least one of them good. Raises ConfigError, also where nothing is held out as asked."""
    parts = training_parts(env)
    source = _stocked(env, parts, "leaves none")
    share = held_share(env)
    if share and _holds_nothing(parts.full, share):
        raise ConfigError(
            f"env.eval_split: {env.eval_split} holds out none of the tasks of {source.name}: raise the share, or "
            "leave it out"
        )
    return source


def tasks_to_evaluate(env: TaskSettings) -> Source:
    """`evaluation_tasks`, at least one of them good. Raises ConfigError."""
    return _stocked(env, evaluation_parts(env), "holds out none")


def _stocked(env: TaskSettings, parts: Parts, lack: str) -> Source:
    """The selected tasks. What was read to find one is not read again by its first reader. `lack`: what a share
    does that gives no task."""
    source = parts.selected
    stream = iter(source)
    beginning: list[Task | BadTask] = []
    for task in stream:
        beginning.append(task)
        if isinstance(task, Task):
            break
    else:
        raise ConfigError(_reason(env, parts, lack))
    _demand_all_names(env, parts.full)
    streams = [chain(beginning, stream)] if len(beginning) < _MAX_HELD else []

    def read() -> Iterator[Task | BadTask]:
        return streams.pop() if streams else iter(source)

    return replace(source, read=read)


def _demand_all_names(env: TaskSettings, source: Source) -> None:
    """Raises ConfigError if a level or tag that is asked for beside others is no task's, as far as is known after
    a while."""
    levels, tags, ends = set(env.levels), set(env.tags), time.monotonic() + _LONGEST_S
    if len(levels) < 2 and len(tags) < 2:
        return
    for task in source:
        if isinstance(task, Task):
            levels.discard(task.level or "")
            tags -= tags_of(task)
        if not levels | tags or time.monotonic() > ends:
            return
    for name, missing in (("levels", levels), ("tags", tags)):
        if missing:
            raise ConfigError(f"env.{name}: no task of {source.name} has {_some(missing)}; leave it out")


def _holds_nothing(source: Source, share: float) -> bool:
    """Whether that is known after a while."""
    ends = time.monotonic() + _LONGEST_S
    for task in source:
        if isinstance(task, Task) and held_out(task.task_id, share):
            return False
        if time.monotonic() > ends:
            return False
    return True


def _reason(env: TaskSettings, parts: Parts, lack: str) -> str:
    """Why there is no task; all are read for it."""
    name, good, first_bad, bad = parts.selected.name, 0, None, 0
    levels, tags = Counter[str](), Counter[str]()
    for task in parts.part:
        if isinstance(task, BadTask):
            bad, first_bad = bad + 1, first_bad or task
            continue
        good += 1
        levels[task.level or "none"] += 1
        tags.update(tags_of(task))
    if good and env.only_checked_tasks and not any(isinstance(task, Task) for task in parts.checked):
        counts = parts.checked.notes()[-1]
        return f"env.only_checked_tasks: {counts}; run `orchestrator check-tasks {env.dataset}`"
    if good and env.levels and not set(env.levels) & set(levels):
        return f"env.levels: none of the {good} tasks has {_some(env.levels)}; their levels are {_some(levels)}"
    if good and env.tags and not set(env.tags) & set(tags):
        return f"env.tags: none of the {good} tasks has {_some(env.tags)}; their tags are {_some(tags)}"
    if good:
        return f"env.levels, env.tags: none of the {good} tasks fits both"
    if first_bad is not None:
        which = "the only row" if bad == 1 else f"all {bad} rows"
        why = "".join(f"; {note}" for note in parts.full.notes()[:1])
        return f"env.dataset: {name}: {which} cannot be used; {first_bad.task_id}: {first_bad.reason}{why}"
    if held_share(env) is not None:
        return f"env.eval_split: {env.eval_split} {lack} of the tasks of {env.dataset}: change the share"
    return f"env.dataset: {name} has no tasks: it is empty"


def _some(names: object) -> str:
    """Some of them, as they could be given."""
    texts = sorted(map(str, names))  # type: ignore[call-overload]
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return (", ".join(ascii(name)[1:61].rstrip("'") for name in texts[:_MAX_SHOWN]) or "none") + more
