"""`orchestrator process`: groups of scored rollouts to a JSONL file."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, aclosing

from orchestrator.engine.one_group import Begin
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.run_json import no_sampled_ids
from orchestrator.engine.session import Session
from orchestrator.host.base import Hosts
from orchestrator.report import leave_report
from orchestrator.rules.observer import Observer
from orchestrator.run.files import report_beside
from orchestrator.run.output import NO_MORE, OpenRun, open_run, run_directory_path
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.tasks.base import Source
from orchestrator.tasks.no_tasks import tasks_to_train
from orchestrator.terminal.closing import closing_table, dropped_text
from orchestrator.terminal.open import open_progress

EXIT_INCOMPLETE = 1


def run(config: Config, command: str = "process") -> int:
    """0: every asked-for group was written; 1: some not, or none; 128 + n after a signal. `command`: what
    continues a run that was stopped."""
    return asyncio.run(work(config, command))


async def work(
    config: Config,
    command: str = "process",
    tasks: Source | None = None,
    begin: Begin | None = None,
    about: Mapping[str, object] = NO_MORE,
) -> int:
    """As `run`, in a running loop. `tasks`: in place of those to train on; `begin`: where their rollouts begin;
    `about`: what run.json says besides."""
    env = config.env
    env.demand_rounds()
    tasks = tasks or tasks_to_train(env)
    path = run_directory_path(env)
    wanted = env.total_steps if env.total_steps > 0 else None
    tally = Tally(Prices.of(config.openai, env), all_segments=bool(env.all_segments))
    progress = open_progress(wanted, tally)
    observer = Observer(listeners=[tally, progress], say=progress.say, run_path=path, wanted=wanted)
    orchestrator = Orchestrator(config, observer)
    orchestrator.maker.begin = begin or orchestrator.maker.begin
    session = Session(path, progress.say, tally, command)
    rows: list[tuple[str, object]] = []

    def open_output(engine: Orchestrator) -> AbstractContextManager[OpenRun]:
        return open_run(env, path, tally, engine.maker.group_format, about)

    async def make() -> int:
        async with session.opened(orchestrator, open_output, tasks.name, tasks.notes) as (engine, output):
            if ids := no_sampled_ids(engine.hosts):
                rows.append(("token ids", ids))
            rows.extend([("groups file", output.groups.path), ("run directory", path)])
            if wanted is None:
                progress.wanted = observer.wanted = await asyncio.to_thread(tasks.count)
            session.after.push_async_callback(_report, engine.hosts, output, rows)
            engine.record_to(output)
            async with aclosing(engine.groups(tasks, output.earlier)) as groups:
                async for _ in groups:
                    pass
        complete = tally.groups and not tally.dropped and (wanted is None or tally.groups >= wanted)
        return 0 if complete else EXIT_INCOMPLETE  # bad tasks alone do not make a run incomplete

    try:
        with progress:
            return await session.until_stopped(make(), orchestrator.drain, env.drain_timeout)
    finally:
        if tally.dropped:
            rows.insert(0, ("dropped", dropped_text(tally, session.way_on)))
        if rows:
            closing_table(tally, rows, wanted=progress.wanted)


async def _report(hosts: Hosts, output: OpenRun, rows: list[tuple[str, object]]) -> None:
    """Writes the report beside the groups file, of whatever is there. Rows tell of it, and how faithful a replay
    was."""
    groups = output.groups.path
    html = await leave_report(output.run.path, groups, report_beside(groups), tokenizer=hosts.tokenizer)
    rows.append(("report", html))
    if (replayed := await hosts.replayed()) is not None:
        rows.append(("replay", replayed))
