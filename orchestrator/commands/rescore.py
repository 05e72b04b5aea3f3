"""`orchestrator rescore RUN_DIR`: the scores of a run made anew from its record, as a run directory of its own."""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import check_source, load_tokenizer
from orchestrator.engine.group import GroupPolicy
from orchestrator.engine.health import GROUPS, HealthGate
from orchestrator.errors import ConfigError, EnvironmentUnusable, os_error_as
from orchestrator.report import write_report
from orchestrator.rescoring.changes import Changes
from orchestrator.rescoring.grouping import Grouping
from orchestrator.rescoring.output import SETTING, NewRun, new_run
from orchestrator.rescoring.rescore import LeftOut, Overview, Rescored, Rescorer, Result
from orchestrator.rescoring.table import print_changes
from orchestrator.rules.text import error_line, printable
from orchestrator.run.directory import new_run_directory
from orchestrator.run.files import (
    GROUPS_FILE,
    SCHEMA,
    is_going_on,
    read_recorded,
    report_beside,
    saved_env,
    saved_tokenizer,
)
from orchestrator.run.groups import GroupFormat
from orchestrator.run.lines import end_now, texts
from orchestrator.run.new_folder import demand_free
from orchestrator.scorers.open import open_scorer
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks.split import tasks_of
from orchestrator.terminal.bar import bar
from orchestrator.terminal.signals import Stopped, stoppable
from orchestrator.types import Task

EXIT_INCOMPLETE = 1
# What is taken over from the run's run.json, besides its settings.
_FACTS = ("seed", "tasks", "tokenizer", "tokenizer_digest", "token_ids", "why_text", "agent", "sandbox")


def run(config: Config, run_dir: Path) -> int:
    """0: every line was read, every group is written, no score was lost; 1: not so; 128 + n after a signal."""
    described, record = read_recorded(run_dir, "RUN_DIR")
    if config.env.zero_variance == "resample" and saved_env(dict(described)).get("zero_variance") != "resample":
        raise ConfigError("env.zero_variance: nothing is drawn again here; say keep or drop")
    try:
        work = _rescored(config, run_dir, described, record)
        return asyncio.run(stoppable(work, drain=lambda: None, drain_timeout_s=0))
    except Stopped as stopped:
        print(f"stopped by {stopped}; nothing was written", flush=True)
        return stopped.exit_code


async def _rescored(config: Config, run_dir: Path, described: Mapping[str, Any], record: Path) -> int:
    path = config.env.run_dir or new_run_directory()
    growing = is_going_on(run_dir)
    notes = [f"{run_dir} is still running; its finished rollouts were scored"] if growing else []
    work = _Work()
    demand_free(path, SETTING)
    with os_error_as(ConfigError, f"cannot read {record}"):
        end = await asyncio.to_thread(end_now, record, growing=growing)
        overview = await asyncio.to_thread(Overview.of, texts(record, end))
    tasks, missing = await asyncio.to_thread(_tasks, config, described, overview)
    with new_run(path) as run:
        async with AsyncExitStack() as stack:
            scorer = await open_scorer(config.env, config.judge_api_key, config.startup_timeout, stack)
            tokenizer = await asyncio.to_thread(_tokenizer, config, described, notes)
            work.began = time.monotonic()
            policy = GroupPolicy.parse(config.env.group_policy, config.env.zero_variance)
            grouping = Grouping(policy, config.env.group_size)
            advance = stack.enter_context(bar(overview.lines, "lines", sys.stderr))

            async def take(results: list[Result]) -> None:
                await asyncio.to_thread(work.take, results, run, grouping)
                advance(len(results))

            health = HealthGate(window=GROUPS * config.env.group_size)
            rescorer = Rescorer(scorer, tokenizer, tasks, missing, overview, health)
            await rescorer.run(texts(record, end), take)
            form = GroupFormat.of(config.env, tokenizer, include_messages=config.env.include_messages)
            groups = grouping.groups(run.record, tasks, form)
            work.dropped = await asyncio.to_thread(run.write_groups, groups)
            work.ended = time.monotonic()
        run.describe(_facts(config, run_dir, described, notes))
        report = await asyncio.to_thread(_report, run, path)
    for note in notes:
        print(printable(f"note: {note}"), flush=True)
    places = [("groups file", path / GROUPS_FILE), ("run directory", path), ("report", report)]
    print_changes(work.changes, work.left_out, work.dropped, [("time", work.speed()), *places])
    return 0 if work.is_whole else EXIT_INCOMPLETE


@dataclass(slots=True)
class _Work:
    """What was done so far. Times of a monotonic clock."""

    began: float = 0.0
    ended: float = 0.0
    attempts: int = 0
    changes: Changes = field(default_factory=Changes)
    left_out: list[LeftOut] = field(default_factory=list)
    dropped: dict[int, str | None] = field(default_factory=dict)

    def take(self, results: list[Result], run: NewRun, grouping: Grouping) -> None:
        """Writes and counts results. Raises OSError."""
        for result in results:
            if isinstance(result, LeftOut):
                self.left_out.append(result)
                continue
            offset = run.add(result.text)
            if isinstance(result, Rescored):
                self.attempts += 1
                self.changes.add(result.before, result.after)
                grouping.add(result.after, offset)

    @property
    def is_whole(self) -> bool:
        lost = self.left_out or self.changes.lost
        return bool(self.dropped) and not lost and not any(self.dropped.values())

    def speed(self) -> str:
        """How long it took from the first line on, report excluded."""
        seconds = self.ended - self.began
        return f"{seconds:.1f} s for {self.attempts} rollouts, {self.attempts / seconds:.0f} a second"


def _tasks(config: Config, described: Mapping[str, Any], overview: Overview) -> tuple[dict[str, Task | str], str]:
    """(the record's tasks, or why there is none; what is said of those that the data set does not have)."""
    source = tasks_of(config.env, described)
    found: dict[str, Task | str] = {}
    for name, task in source.named(overview.tasks).items():
        found[name] = task if isinstance(task, Task) else f"its task cannot be read: {task.reason}"
    if overview.tasks and not any(isinstance(task, Task) for task in found.values()):
        raise ConfigError(f"none of the run's tasks is in {source.name}; name the data set with --env.dataset")
    return found, f"its task is not in {source.name}"


def _tokenizer(config: Config, described: Mapping[str, Any], notes: list[str]) -> Tokenizer | None:
    """The tokenizer that the run had, unless another one is named. Raises EnvironmentUnusable where ids have to be
    made and there is none."""
    env = config.env
    requested, recorded = env.tokenizer_name, saved_env(dict(described)).get("tokenizer_name")
    of_run = requested is None or requested == recorded
    name = saved_tokenizer(dict(described))[0] if of_run else requested
    if not isinstance(name, str) or name.lower() in ("", "none"):
        return None
    try:
        check_source(name, here_only=of_run)
    except EnvironmentUnusable as error:
        if described.get("token_ids") != "exact":
            raise
        notes.append(f"{error}: messages keep the tokens that end a turn")
        return None
    return load_tokenizer(name, env.chat_template_kwargs, here_only=of_run)


def _facts(config: Config, run_dir: Path, described: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The content of run.json: the run's, but for what decided here."""
    now = config.public()["env"]
    own = [name for name, row in EnvSettings.rows().items() if "rescore" in row.from_run]
    env = {**saved_env(dict(described)), **{name: now[name] for name in sorted(own)}}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "config": {**described["config"], "env": env},
        **{name: described[name] for name in _FACTS if name in described},
        "command": "rescore",
        "of": str(run_dir),
        "groups_file": GROUPS_FILE,
        "notes": notes,
    }


def _report(run: NewRun, path: Path) -> str:
    html = report_beside(run.groups)
    try:
        write_report(run.folder, run.groups, html, named=(path.absolute().name, str(path)))
    except Exception as error:  # the data are written: a failing report must not fail them
        return f"none, it could not be written: {error_line(error)}"
    return str(path / html.name)
