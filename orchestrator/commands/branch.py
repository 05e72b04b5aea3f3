"""`orchestrator branch RUN_DIR --rollout ID --turn K`: other continuations of a recorded rollout."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.commands import process
from orchestrator.engine.one_group import Begin
from orchestrator.engine.same_ids import same_ids
from orchestrator.engine.shared import Shared
from orchestrator.errors import ConfigError
from orchestrator.rules.plan import derive_seed
from orchestrator.run.files import EVALUATE
from orchestrator.run.parent import Parent, digest_in, read_parent
from orchestrator.settings.config import Config
from orchestrator.tasks.base import Source
from orchestrator.tasks.split import tasks_of
from orchestrator.types import Prefix, Task
from orchestrator.types.prefix import branching


def run(config: Config, run_dir: Path, rollout: str | None, turn: int, n: int, say: str | None) -> int:
    """0: the group was written; 1: no continuation was scored; 128 + n after a signal."""
    if rollout is None:
        raise ConfigError("--rollout is missing: the id of a rollout, like g000003-r01-a0")
    if all(server.base_url.startswith("replay:") for server in config.openai):
        raise ConfigError(
            "the run's endpoint is a recording, which samples nothing: name one by --openai.base_url"
        )
    parent = read_parent(run_dir, rollout)
    place = parent.turn(turn)
    _prefix(parent, place, say, same=True)  # raises ConfigError
    tasks = _task(config, parent)
    about = {
        "command": "branch",
        "of": str(run_dir),
        "rollout": rollout,
        "turn": place,
        **({"say": say} if say else {}),
        **({"held_out": True} if _is_held_out(parent.described) else {}),
    }
    return asyncio.run(
        process.work(_branching(config, parent, place, n), "", tasks, _begin(parent, place, say), about)
    )


def _branching(config: Config, parent: Parent, turn: int, n: int) -> Config:
    """The settings of a run of one group. Those that cannot be brought to the turn are not drawn again: it would
    be no better. The seed is the run's and the place's: with the run's own, the first would say the same again."""
    name = f"{parent.attempt.rollout_id} {turn}"
    env = replace(
        config.env,
        group_size=n,
        group_policy="partial:1",
        seed=None if config.env.seed is None else derive_seed(config.env.seed, name, 0, 0, 0),
    )
    return replace(config, env=env)


def _task(config: Config, parent: Parent) -> Source:
    """The rollout's task alone. Raises ConfigError."""
    attempt = parent.attempt
    source = tasks_of(config.env, parent.described)
    task = source.named({attempt.task_id}).get(attempt.task_id)
    if task is None:
        raise ConfigError(f"task {attempt.task_id} is not in {source.name}; name the data set with --env.dataset")
    if not isinstance(task, Task):
        raise ConfigError(f"task {attempt.task_id} cannot be read: {task.reason}")
    if task.reference != attempt.reference:
        raise ConfigError(f"task {attempt.task_id} of {source.name} has another answer than when it was recorded")
    return Source(f"{attempt.task_id} of {source.name}", lambda: iter([task]), lambda: 1)


def _begin(parent: Parent, turn: int, say: str | None) -> Begin:
    async def begin(shared: Shared, task: Task, number: int) -> Prefix:
        before = parent.attempt.record.turns[: turn - 1]
        same = await asyncio.to_thread(same_ids, before, digest_in(parent.described), shared.open_now.hosts)
        if before and not same:
            shared.say("note: this endpoint's ids are others: what came before is taken as text")
        return _prefix(parent, turn, say, same=same)

    return begin


def _prefix(parent: Parent, turn: int, say: str | None, *, same: bool) -> Prefix:
    try:
        name, record = parent.attempt.rollout_id, parent.attempt.record
        return branching(name, record, turn, same_ids=same, say=say or "", run=str(parent.run_dir))
    except ValueError as error:
        raise ConfigError(f"--turn: {error}") from error


def _is_held_out(described: Mapping[str, Any]) -> bool:
    return described.get("command") == EVALUATE or described.get("held_out") is True
