"""`orchestrator evaluate`: how many tasks a model solves, and how sure that is."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from json import dumps
from pathlib import Path

from orchestrator.completion.base import Tokenizer
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.session import Session
from orchestrator.evaluation.evaluate import measure
from orchestrator.evaluation.files import METRICS, SAMPLES, EvaluationFiles, finished_metrics
from orchestrator.evaluation.measured import Evaluation
from orchestrator.evaluation.table import print_evaluation
from orchestrator.report import leave_report
from orchestrator.rules.observer import Observer
from orchestrator.run.files import EVALUATION_PAGE, GROUPS_FILE
from orchestrator.run.output import run_directory_path
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks.no_tasks import tasks_to_evaluate
from orchestrator.terminal.open import open_progress

EXIT_INCOMPLETE = 1


def run(config: Config, json: bool = False, no_answers: bool = False) -> int:
    """0: every sample was judged; 1: some are missing, or there was no task; 128 + n after a signal."""
    return asyncio.run(_run(replace(config, env=config.env.for_evaluation()), json, answers=not no_answers))


async def _run(config: Config, json: bool, *, answers: bool) -> int:
    env = config.env
    tasks = tasks_to_evaluate(env)
    path = run_directory_path(env)
    prices = Prices.of(config.openai, env)
    if env.resume is not None and (count := await asyncio.to_thread(tasks.count)) is not None:
        wanted = min(env.total_steps if env.total_steps > 0 else count, count)
        if metrics := finished_metrics(env.resume, env.data_dir_to_save_evals, prices, wanted):
            where = f"{path} is finished: {wanted} tasks, accuracy {metrics.get('eval/accuracy', 0.0):.1%}"
            print(
                f"{where}; nothing was left to do, and nothing was written",
                file=sys.stderr if json else sys.stdout,
            )
            return _answer(path, json, metrics, complete=True)
    evaluation, tally = Evaluation(env.eval_samples, prices), Tally(prices)
    progress = open_progress(env.total_steps if env.total_steps > 0 else None, tally)
    observer = Observer(listeners=[tally, progress], say=progress.say, notes=_notes(env), run_path=path)
    orchestrator = Orchestrator(config, observer, split="eval")
    session = Session(path, progress.say, tally, "evaluate")
    rows: list[tuple[str, object]] = []

    def open_output(_: Orchestrator) -> AbstractContextManager[EvaluationFiles]:
        files = EvaluationFiles(
            path, env, env.data_dir_to_save_evals, resume=env.resume is not None, counted=tally.earlier_attempt
        )
        return closing(files)

    async def report(files: EvaluationFiles, tokenizer: Tokenizer | None) -> None:
        html = files.target / EVALUATION_PAGE
        rows.append(
            ("report", await leave_report(path, path / GROUPS_FILE, html, tokenizer=tokenizer, answers=answers))
        )

    async def work() -> int:
        async with session.opened(orchestrator, open_output, tasks.name, tasks.notes) as (engine, files):
            rows.append(("run directory", path))
            if (count := await asyncio.to_thread(tasks.count)) is not None:
                progress.wanted = observer.wanted = min(progress.wanted or count, count)
            session.after.push_async_callback(report, files, engine.hosts.tokenizer)
            await measure(engine, tasks, evaluation, files)
            if (replayed := await engine.hosts.replayed()) is not None:
                rows.append(("replay", replayed))
            if not engine.cut_short:
                await files.finish(evaluation, config.openai[0].model_name, config.sampling())
                rows[:0] = [(name.partition(".")[0], files.target / name) for name in (METRICS, SAMPLES)]
        return 0 if evaluation.complete else EXIT_INCOMPLETE

    try:
        with progress:
            return await session.until_stopped(work(), orchestrator.drain, env.drain_timeout)
    finally:
        if rows:
            print_evaluation(evaluation, tally, rows, sys.stderr if json else sys.stdout)
            complete = evaluation.complete and not orchestrator.cut_short
            _answer(path, json, evaluation.metrics(), complete=complete)


def _answer(path: Path, json: bool, metrics: Mapping[str, float], *, complete: bool) -> int:
    """Prints the answer for programs, where it is asked for."""
    if json:
        print(dumps({"run": str(path), "complete": complete, "metrics": metrics}, indent=2))
    return 0


def _notes(env: EnvSettings) -> list[str]:
    notes = []
    if env.eval_split is None:
        notes.append(
            "env.eval_split is not set: nothing is held out, so these may be tasks the model was trained on"
        )
    if env.eval_samples > 1 and env.temperature == 0:
        notes.append("at temperature 0 the samples of a task are all the same; set --env.eval_temperature")
    return notes
