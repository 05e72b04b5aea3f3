"""`orchestrator process`: groups of scored rollouts to a JSONL file."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import TYPE_CHECKING

from orchestrator.engine.orchestrator import Orchestrator, freeze
from orchestrator.errors import CostReached, RunUnhealthy
from orchestrator.host.base import Hosts
from orchestrator.report import write_report
from orchestrator.rules.observer import Observer
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.files import RUN_FILE, report_beside
from orchestrator.run.groups import check_writable
from orchestrator.run.output import OpenRun, describe, open_run, run_directory_path
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.tasks.demand import tasks_to_train
from orchestrator.terminal.closing import closing_table, dropped_text
from orchestrator.terminal.progress import open_progress
from orchestrator.terminal.signals import NOTHING_BEGUN, Stopped, stoppable
from orchestrator.types import Group

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

EXIT_INCOMPLETE = 1


def run(config: Config, command: str = "process") -> int:
    """0: every asked-for group was written; 1: some not, or none; 128 + n after a signal. `command`: what
    continues a run that was stopped."""
    return asyncio.run(work(config, command))


async def work(config: Config, command: str = "process") -> int:
    """As `run`, in a running loop."""
    env = config.env
    tasks = tasks_to_train(env)
    run_path = run_directory_path(env)
    check_writable(run_path)
    if env.data_path_to_save_groups:
        check_writable(env.data_path_to_save_groups.parent)
    wanted = env.total_steps if env.total_steps > 0 else None
    way_on = f"orchestrator {command} --env.resume {run_path}"
    tally = Tally(Prices.of(config), all_segments=bool(config.env.all_segments))
    progress = open_progress(wanted, tally)
    observer = Observer(listeners=[tally, progress], say=progress.say, run_path=run_path, wanted=wanted)
    orchestrator = Orchestrator(config, observer)
    rows: list[tuple[str, object]] = []

    async def make() -> int:
        with ExitStack() as files:  # closed last: attempts that are cancelled on the way out are still recorded
            # What is pushed on `after` runs when the sandboxes are gone: a second signal may cut it short.
            async with AsyncExitStack() as after, orchestrator:
                freeze()
                output = files.enter_context(open_run(config, run_path, tally, orchestrator.group_format))
                rows.extend([("groups file", output.groups.path), ("run directory", run_path)])
                if other := orchestrator.no_sampled_ids:
                    rows.insert(0, ("token ids", other))
                await describe(output, orchestrator, tasks.name)
                for note in observer.notes:
                    progress.say(f"note: {note}")
                progress.say(orchestrator.summary())
                if wanted is None:
                    progress.wanted = observer.wanted = await asyncio.to_thread(tasks.count)
                orchestrator.open_purse(tally)
                observer.writer = output.run
                after.push_async_callback(_report, orchestrator.hosts, output, rows)

                async def finished(group: Group) -> None:
                    if group.dropped is None:
                        await output.groups.append(group)
                    await observer.group(group)

                async with aclosing(orchestrator.groups(tasks, output.earlier)) as groups:
                    async for group in groups:
                        await uninterrupted(finished(group))  # a written group is counted even when cancelled here
        whole = tally.groups and not tally.dropped and (wanted is None or tally.groups >= wanted)
        return 0 if whole else EXIT_INCOMPLETE  # bad tasks alone do not make a run incomplete

    try:
        with progress:
            return await stoppable(make(), drain=orchestrator.drain, drain_timeout_s=env.drain_timeout)
    except Stopped as stopped:
        begun = (run_path / RUN_FILE).exists()
        progress.say(f"stopped by {stopped}; " + (f"go on with `{way_on}`" if begun else NOTHING_BEGUN))
        return stopped.exit_code
    except CostReached as error:
        raise CostReached(f"{error}: `{way_on} --env.max_cost MORE`") from error
    except RunUnhealthy as error:
        raise RunUnhealthy(f"{error}; `{way_on}` goes on, and gets past tasks that are at fault alone") from error
    finally:
        if tally.dropped:
            rows.insert(0, ("dropped", dropped_text(tally, way_on)))
        if rows:
            closing_table(tally, rows, wanted=progress.wanted)


async def _report(hosts: Hosts, output: OpenRun, rows: list[tuple[str, object]]) -> None:
    """Writes the report beside the groups file, of whatever is there. Rows tell of it, and how faithful a replay
    was."""
    html = report_beside(output.groups.path)
    try:
        await asyncio.to_thread(write_report, output.run.path, output.groups.path, html, tokenizer=hosts.tokenizer)
        rows.append(("report", html))
    except Exception as error:  # the data are written: a failing report must not fail the run
        rows.append(("report", f"none, it could not be written: {type(error).__name__}: {error}"))
    if (replayed := await hosts.replayed()) is not None:
        rows.append(("replay", replayed))
