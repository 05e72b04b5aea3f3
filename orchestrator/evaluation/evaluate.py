"""Measures a model on tasks.

The engine makes the samples, `measured.py` counts them, and `files.py` writes the result:

    evaluation = await evaluate(orchestrator, tasks, directory)     # beside training, under its budget
"""

from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

from orchestrator.engine.groups import open_groups
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.run_json import describe
from orchestrator.evaluation.files import EvaluationFiles
from orchestrator.evaluation.measured import Evaluation
from orchestrator.rules.observer import Observer
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.prices import Prices
from orchestrator.tasks.base import Source
from orchestrator.types import Group


async def evaluate(orchestrator: Orchestrator, tasks: Source, directory: Path) -> Evaluation | None:
    """Runs one evaluation beside the other work of `orchestrator`, which must be open: under the same sandbox
    budget, with at most `env.max_eval_workers` tasks at a time.

    Everything is recorded in `directory`, a run directory of its own. If it holds an evaluation that was broken
    off, that one is continued. metrics.json and samples.jsonl go there or to `env.data_dir_to_save_evals`. None:
    the run was drained before the end, and neither was written. Raises what ends a run; ConfigError, RunLocked.
    """
    env = orchestrator.config.env.for_evaluation()
    tasks_at_once = min(open_groups(env, orchestrator.maker.hosts.capacity), env.max_eval_workers)
    env = replace(env, total_steps=-1, max_open_groups=tasks_at_once)
    config = replace(orchestrator.config, env=env)
    observer = Observer(say=orchestrator.observer.say, run_path=directory)
    beside = orchestrator.beside(config, observer, split="eval")
    evaluation = Evaluation(env.group_size, Prices.of(config.openai, env))
    with closing(
        EvaluationFiles(directory, env, env.data_dir_to_save_evals, resume=(directory / "run.json").exists())
    ) as files:
        await describe(files.run, beside.maker, tasks.name, files.about)
        observer.writer = files.run
        await measure(beside, tasks, evaluation, files)
        if beside.cut_short:
            return None
        await files.finish(evaluation, config.openai[0].model_name, config.sampling())
    return evaluation


async def measure(
    orchestrator: Orchestrator, tasks: Source, evaluation: Evaluation, files: EvaluationFiles
) -> None:
    """Runs every task. Each group is written to `files`, then counted by `evaluation`, then told to listeners."""

    async def finished(group: Group) -> None:
        await files.take(group)
        evaluation.take(group)
        await orchestrator.observer.group(group)

    orchestrator.observer.listeners.append(evaluation)
    evaluation.bad_tasks += len(files.earlier.bad)
    async with aclosing(orchestrator.groups(tasks, files.earlier)) as groups:
        async for group in groups:
            await uninterrupted(finished(group))  # a written group is counted even when cancelled here
