"""Refuses a run that would have nothing to do, with the reason: an empty file, other names of columns, filters
that fit nothing, a share that holds nothing out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import Source
from orchestrator.tasks.selection import held_out, tags_of
from orchestrator.tasks.split import evaluation_tasks, held_share, training_tasks, whole_source
from orchestrator.types import BadTask, Task

if TYPE_CHECKING:
    from orchestrator.settings.tasks import TaskSettings

_MAX_HELD = 10_000  # bad tasks before the first good one that are kept for the first reading
_LONGEST_S = 2.0  # of looking for a held-out task
_MAX_SHOWN = 8


def tasks_to_train(env: TaskSettings) -> Source:
    """`training_tasks`, at least one of them good. Raises ConfigError, also where nothing is held out as asked."""
    source = _stocked(env, training_tasks(env), held=False)
    _demand_all_names(env, whole_source(env))
    share = held_share(env)
    if share and _holds_nothing(whole_source(env), share):
        raise ConfigError(
            f"env.eval_split: {env.eval_split} holds out none of the tasks of {source.name}: raise the share, or "
            "leave it out"
        )
    return source


def tasks_to_evaluate(env: TaskSettings) -> Source:
    """`evaluation_tasks`, at least one of them good. Raises ConfigError."""
    source = _stocked(env, evaluation_tasks(env), held=True)
    _demand_all_names(env, whole_source(env) if held_share(env) else evaluation_tasks(env, filtered=False))
    return source


def _stocked(env: TaskSettings, source: Source, *, held: bool) -> Source:
    """The source. What was read to find a task is not read again by its first reader."""
    stream = iter(source)
    beginning: list[Task | BadTask] = []
    for task in stream:
        beginning.append(task)
        if isinstance(task, Task):
            break
    else:
        raise ConfigError(_reason(env, source, held=held))
    streams = [chain(beginning, stream)] if len(beginning) < _MAX_HELD else []

    def read() -> Iterator[Task | BadTask]:
        return streams.pop() if streams else iter(source)

    return Source(source.name, read, source.size)


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


def _reason(env: TaskSettings, source: Source, *, held: bool) -> str:
    """Why there is no task; all are read for it."""
    unfiltered = evaluation_tasks(env, filtered=False) if held else training_tasks(env, filtered=False)
    good, first_bad, bad = 0, None, 0
    levels, tags = Counter[str](), Counter[str]()
    for task in unfiltered:
        if isinstance(task, BadTask):
            bad, first_bad = bad + 1, first_bad or task
            continue
        good += 1
        levels[task.level or "none"] += 1
        tags.update(tags_of(task))
    if good and env.levels and not set(env.levels) & set(levels):
        return f"env.levels: none of the {good} tasks has {_some(env.levels)}; their levels are {_some(levels)}"
    if good and env.tags and not set(env.tags) & set(tags):
        return f"env.tags: none of the {good} tasks has {_some(env.tags)}; their tags are {_some(tags)}"
    if good:
        return f"env.levels, env.tags: none of the {good} tasks fits both"
    if first_bad is not None:
        which = "the only row" if bad == 1 else f"all {bad} rows"
        return f"env.dataset: {source.name}: {which} cannot be used; {first_bad.task_id}: {first_bad.reason}"
    if held_share(env) is not None:
        part = "holds out none" if held else "leaves none"
        return f"env.eval_split: {env.eval_split} {part} of the tasks of {env.dataset}: change the share"
    return f"env.dataset: {source.name} has no tasks: it is empty"


def _some(names: object) -> str:
    """Some of them, as they could be given."""
    texts = sorted(map(str, names))  # type: ignore[call-overload]
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return (", ".join(ascii(name)[1:61].rstrip("'") for name in texts[:_MAX_SHOWN]) or "none") + more
