"""`orchestrator evaluate`: how many tasks a model solves, and how sure that is."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from orchestrator.engine.orchestrator import Orchestrator, freeze
from orchestrator.evaluation.evaluate import evaluation_config, measure
from orchestrator.evaluation.files import EvaluationFiles
from orchestrator.evaluation.measured import Evaluation
from orchestrator.evaluation.table import print_evaluation
from orchestrator.rules.observer import Observer
from orchestrator.run.files import RUN_FILE
from orchestrator.run.output import run_directory_path
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.tasks.demand import tasks_to_evaluate
from orchestrator.terminal.progress import open_progress
from orchestrator.terminal.signals import NOTHING_BEGUN, Stopped, stoppable

if TYPE_CHECKING:
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import EnvSettings

EXIT_INCOMPLETE = 1


def run(config: Config) -> int:
    """0: every sample was judged; 1: some are missing, or there was no task; 128 + n after a signal."""
    return asyncio.run(_run(evaluation_config(config)))


async def _run(config: Config) -> int:
    env = config.env
    tasks = tasks_to_evaluate(env)
    path = run_directory_path(env)
    prices = Prices.of(config)
    evaluation, tally = Evaluation(env.eval_samples, prices), Tally(prices)
    progress = open_progress(env.total_steps if env.total_steps > 0 else None, tally)
    observer = Observer(listeners=[tally, progress], say=progress.say, notes=_notes(env), run_path=path)
    orchestrator = Orchestrator(config, observer, split="eval")
    rows: list[tuple[str, object]] = []

    async def work() -> int:
        async with orchestrator:
            freeze()
            files = EvaluationFiles(path, env, resume=env.resume is not None, counted=tally.earlier_attempt)
            with closing(files):
                rows.append(("run directory", path))
                await files.describe(orchestrator, tasks)
                for note in observer.notes:
                    progress.say(f"note: {note}")
                progress.say(orchestrator.summary())
                if (count := await asyncio.to_thread(tasks.count)) is not None:
                    progress.wanted = observer.wanted = min(progress.wanted or count, count)
                orchestrator.open_purse(tally)
                await measure(orchestrator, tasks, evaluation, files)
                if (replayed := await orchestrator.hosts.replayed()) is not None:
                    rows.append(("replay", replayed))
                if not orchestrator.cut_short:
                    await files.finish(evaluation, config)
                    written = ("metrics.json", "samples.jsonl")
                    rows[:0] = [(name.partition(".")[0], files.target / name) for name in written]
        return 0 if evaluation.complete else EXIT_INCOMPLETE

    try:
        with progress:
            return await stoppable(work(), drain=orchestrator.drain, drain_timeout_s=env.drain_timeout)
    except Stopped as stopped:
        on = f"what follows is of the tasks that were done; go on with `orchestrator evaluate --env.resume {path}`"
        progress.say(f"stopped by {stopped}: {on if (path / RUN_FILE).exists() else NOTHING_BEGUN}")
        return stopped.exit_code
    finally:
        if rows:
            print_evaluation(evaluation, tally, rows)


def _notes(env: EnvSettings) -> list[str]:
    notes = []
    if env.eval_split is None:
        notes.append(
            "env.eval_split is not set: nothing is held out, so these may be tasks the model was trained on"
        )
    if env.eval_samples > 1 and env.temperature == 0:
        notes.append("at temperature 0 the samples of a task are all the same; set --env.eval_temperature")
    return notes
