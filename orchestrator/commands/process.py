"""`orchestrator process`: groups of scored rollouts to a JSONL file."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.engine import Observer, Orchestrator
from orchestrator.progress import PlainProgress, Tally, closing_table
from orchestrator.rundir import RunDirectory, new_run_directory
from orchestrator.signals import Stopped, stoppable
from orchestrator.tasks import open_tasks
from orchestrator.types import Attempt, BadTask, EndedName, Group, Member
from orchestrator.writers import GroupsFile, check_writable, fresh_path

if TYPE_CHECKING:
    from orchestrator.config import Config

EXIT_INCOMPLETE = 1


def run(config: Config) -> int:
    """0: every asked-for group was written; 1: some not; 128 + n after a signal."""
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    env = config.env
    tasks = open_tasks(env.dataset, dataset_path=Path(env.dataset_path), split=env.split)
    run_path = Path(env.run_dir) if env.run_dir else new_run_directory()
    groups_path = Path(env.data_path_to_save_groups or run_path / "groups.jsonl")
    check_writable(run_path)
    check_writable(groups_path.parent)

    wanted = env.total_steps if env.total_steps > 0 else None
    tally, progress, observer = Tally(), PlainProgress(wanted), Observer()
    with contextlib.ExitStack() as stack:
        orchestrator = Orchestrator(config, observer)

        async def work() -> int:
            async with orchestrator:
                run = stack.enter_context(contextlib.closing(RunDirectory(run_path)))
                groups_file = fresh_path(groups_path)
                out = stack.enter_context(
                    contextlib.closing(
                        GroupsFile(
                            groups_file,
                            include_messages=env.include_messages,
                            untrained=frozenset(EndedName(name) for name in env.untrained_outcomes),
                        )
                    )
                )
                run.describe(
                    {
                        "version": __version__,
                        "config": config.public(),
                        "seed": orchestrator.seed,
                        "tasks": tasks.name,
                        "notes": observer.notes,
                        **await orchestrator.facts(),
                    }
                )
                for note in observer.notes:
                    progress.say(f"note: {note}")
                progress.say(orchestrator.summary())
                written.extend([("groups file", groups_file), ("run directory", run_path)])

                def recorded(result: Member | Attempt) -> None:
                    run.record(result, full_traces=env.save_full_traces)
                    tally.attempt(result)

                def bad_task(task: BadTask, number: int) -> None:
                    run.record_bad_task(task, number)
                    tally.bad_task()
                    progress.bad_task(task)

                observer.recorded, observer.bad_task = recorded, bad_task
                async for group in orchestrator.groups(tasks):
                    _write(group, out, tally)
                    progress.group(group, tally)
            return _exit_code(tally, wanted)

        written: list[tuple[str, Path]] = []
        code = 0
        try:
            code = await stoppable(work(), drain=orchestrator.drain, drain_timeout_s=env.drain_timeout)
        except Stopped as stopped:
            progress.say(f"stopped by {stopped}; what is finished is on disk")
            code = stopped.exit_code
        if written:
            closing_table(tally, written, sys.stdout)
    return code


def _write(group: Group, out: GroupsFile, tally: Tally) -> None:
    if group.dropped is None:
        out.append(group)
    tally.group(group)


def _exit_code(tally: Tally, wanted: int | None) -> int:
    """All asked for and written? Bad tasks alone do not make a run incomplete."""
    if tally.dropped or not tally.groups:
        return EXIT_INCOMPLETE
    return EXIT_INCOMPLETE if wanted is not None and tally.groups < wanted else 0
