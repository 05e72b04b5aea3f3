"""A recorded run with run.json, whose ids are of the tests' tokenizer: for what reads a run by its settings."""

from __future__ import annotations

from pathlib import Path

from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.settings.sources import load_config
from orchestrator.types import Attempt, BadTask, EndedName, FailedName, Member, Task
from tests.fakes.synthetic_run import Rollouts
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.written import write_run

GROUP_SIZE = 4


def write_recorded_run(directory: Path, groups: int = 2) -> Path:
    """`groups` groups of two solved rollouts, a wrong one and one that is stuck; then a group without ids, one
    that lacks a rollout and has no right one, and a bad task."""
    made = Rollouts(tokenizer=load_tokenizer(str(tokenizer_folder())))
    tasks = [
        Task(f"sum-{n}", f"What is the sum of table {n}?", str(100 + n), source="tables")
        for n in range(groups + 2)
    ]
    results: list[Member | Attempt | tuple[BadTask, int]] = []
    for number, task in enumerate(tasks[:groups]):
        results += [made.solved(task, number, index, correct=index in (0, 2)) for index in range(3)]
        results.append(made.stuck(task, number, 3, EndedName.MAX_STEPS))
    results += [
        made.solved(tasks[-2], groups, index, correct=index < 2, exact=False) for index in range(GROUP_SIZE)
    ]
    results.append(made.broken(tasks[-1], groups + 1, 0, FailedName.SANDBOX_LOST, "the container is gone"))
    results += [made.solved(tasks[-1], groups + 1, index, correct=False) for index in range(1, GROUP_SIZE)]
    results.append((BadTask("torn", "its row is no task"), groups + 2))
    config = load_config(
        env={"group_size": GROUP_SIZE, "tokenizer_name": str(tokenizer_folder()), "seed": 7},
        openai={"base_url": "http://localhost:9/v1", "model_name": "scripted"},
    )
    facts = {"version": "0.1.0", "config": config.public(), "seed": 7, "token_ids": "exact"}
    return write_run(directory, *results, facts=facts)
