"""`orchestrator process`: groups of scored rollouts to a JSONL file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.continued import read_run
from orchestrator.engine import Observer, Orchestrator
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.progress import PlainProgress, Tally, closing_table, open_progress
from orchestrator.report import write_report
from orchestrator.resume import Earlier, read_earlier, repair_groups
from orchestrator.rundir import RunDirectory, new_run_directory
from orchestrator.signals import Stopped, stoppable
from orchestrator.tasks.base import TaskSource
from orchestrator.tasks.split import training_tasks
from orchestrator.types import Attempt, BadTask, Member
from orchestrator.writers import GroupFormat, GroupsFile, check_writable, fresh_path

if TYPE_CHECKING:
    from orchestrator.config import Config
    from orchestrator.settings import EnvSettings

EXIT_INCOMPLETE = 1


def run(config: Config) -> int:
    """0: every asked-for group was written; 1: some not; 128 + n after a signal."""
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    env = config.env
    tasks = training_tasks(env)
    run_path = _run_path(env)
    check_writable(run_path)
    if env.data_path_to_save_groups:
        check_writable(env.data_path_to_save_groups.parent)
    wanted = env.total_steps if env.total_steps > 0 else None
    tally = Tally()
    progress = open_progress(wanted, tally)
    observer = Observer(say=progress.say)
    orchestrator = Orchestrator(config, observer)
    rows: list[tuple[str, object]] = []

    async def work() -> int:
        async with orchestrator:
            with _output(config, run_path, tally, orchestrator.group_format) as output:
                rows.extend([("groups file", output.groups.path), ("run directory", run_path)])
                await _describe(output, orchestrator, tasks)
                for note in observer.notes:
                    progress.say(f"note: {note}")
                progress.say(orchestrator.summary())
                _observe(observer, output, tally, progress, full_traces=env.save_full_traces)
                try:
                    # Closed before the files are: what is cancelled then is still recorded.
                    async with aclosing(orchestrator.groups(tasks, output.earlier)) as groups:
                        async for group in groups:
                            if group.dropped is None:
                                output.groups.append(group)
                            tally.group(group)
                            progress.group(group)
                finally:
                    rows.extend(await _report(orchestrator, output))
        return _exit_code(tally, wanted)

    try:
        with progress:
            return await stoppable(work(), drain=orchestrator.drain, drain_timeout_s=env.drain_timeout)
    except Stopped as stopped:
        progress.say(f"stopped by {stopped}; go on with `orchestrator process --env.resume {run_path}`")
        return stopped.exit_code
    finally:
        if rows:
            closing_table(tally, rows, wanted=wanted)


@dataclass(frozen=True, slots=True)
class _Output:
    """Where everything goes, and what is there already."""

    run: RunDirectory
    groups: GroupsFile
    earlier: Earlier


@contextmanager
def _output(config: Config, run_path: Path, tally: Tally, form: GroupFormat) -> Iterator[_Output]:
    """Opens the run directory and the groups file, new ones or those of the run that is resumed."""
    env = config.env
    asked = env.data_path_to_save_groups if env.resume is None else None
    groups_path = fresh_path(asked) if asked is not None else None  # before the run directory: it may fail
    try:
        directory = RunDirectory(run_path, resume=env.resume is not None, fsync=env.fsync)
    except OrchestratorError:
        if groups_path is not None:
            groups_path.unlink()
        raise
    with closing(directory) as run:
        if env.resume is None:
            groups_path, earlier = groups_path or fresh_path(run_path / "groups.jsonl"), Earlier()
        else:
            groups_path = _groups_path(run_path)
            repair_groups(groups_path, several_lines=form.all_segments)
            earlier = read_earlier(run.rollouts, groups_path, tally.earlier_attempt)
            for scores in earlier.written.values():
                tally.earlier_group(scores)
        with closing(GroupsFile(groups_path, form=form, fsync=env.fsync)) as groups:
            yield _Output(run, groups, earlier)


async def _describe(output: _Output, orchestrator: Orchestrator, tasks: TaskSource) -> None:
    """run.json. Raises ConfigError where tokens would come about in another way than before."""
    facts = await orchestrator.facts()
    if orchestrator.config.env.resume is not None:
        before = read_run(output.run.path).get("token_ids")
        if before != facts["token_ids"]:
            raise ConfigError(
                f"env.resume: the run's token ids are {before}, this endpoint's {facts['token_ids']}; "
                "set --openai.base_url to an endpoint of the same kind"
            )
    run_path, groups_path = output.run.path.absolute(), output.groups.path.absolute()
    inside = groups_path.is_relative_to(run_path)
    output.run.describe(
        {
            "version": __version__,
            "config": orchestrator.config.public(),
            "seed": orchestrator.seed,
            "tasks": tasks.name,
            "groups_file": str(groups_path.relative_to(run_path) if inside else groups_path),
            "notes": orchestrator.observer.notes,
            **facts,
        }
    )


def _observe(
    observer: Observer, output: _Output, tally: Tally, progress: PlainProgress, *, full_traces: bool
) -> None:
    """On disk first, counted then."""

    def recorded(result: Member | Attempt) -> None:
        output.run.record(result, full_traces=full_traces)
        tally.attempt(result)
        progress.attempt(result)

    def bad_task(task: BadTask, number: int) -> None:
        output.run.record_bad_task(task, number)
        tally.bad_task()
        progress.bad_task(task)

    observer.started, observer.recorded, observer.bad_task = progress.started, recorded, bad_task


async def _report(orchestrator: Orchestrator, output: _Output) -> list[tuple[str, object]]:
    """The page beside the groups file, of whatever is there; and, of a replayed run, how faithful it was."""
    around = orchestrator.around
    html = output.groups.path.with_suffix(".html")
    try:
        await asyncio.to_thread(
            write_report, output.run.path, output.groups.path, html, tokenizer=around.tokenizer
        )
        rows: list[tuple[str, object]] = [("report", html)]
    except Exception as error:  # the data are written: no page about them may fail the run
        rows = [("report", f"none, it could not be written: {type(error).__name__}: {error}")]
    if isinstance(around.completer, ReplayCompleter):
        rows.append(("replay", around.completer.account()))
    return rows


def _run_path(env: EnvSettings) -> Path:
    """The directory of the run: the one resumed, the one asked for, a new one. Raises ConfigError."""
    if env.resume is None:
        return Path(env.run_dir) if env.run_dir else new_run_directory()
    if env.run_dir is not None and Path(env.run_dir).resolve() != Path(env.resume).resolve():
        raise ConfigError("env.run_dir: a run is continued in its own directory; leave this out")
    return Path(env.resume)


def _groups_path(run_path: Path) -> Path:
    """The groups file of the run in `run_path`; in the directory itself if that was moved."""
    told = read_run(run_path).get("groups_file")
    if not isinstance(told, str) or not told:
        raise ConfigError(f"env.resume: run.json in {run_path} names no groups file")
    return run_path / told


def _exit_code(tally: Tally, wanted: int | None) -> int:
    """All asked for and written? Bad tasks alone do not make a run incomplete."""
    if tally.dropped or not tally.groups:
        return EXIT_INCOMPLETE
    return EXIT_INCOMPLETE if wanted is not None and tally.groups < wanted else 0
