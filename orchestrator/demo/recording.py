"""The recorded runs: their settings, rollouts and tasks. `bench/recording.py` makes them from finished runs."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.tasks.base import Source
from orchestrator.tasks.harbor.source import harbor_tasks
from orchestrator.tasks.jsonl import jsonl_tasks

ROOT = Path(__file__).resolve().parent
RECORDING = ROOT / "recording"
CODE_RECORDING = ROOT / "code"
TASKS = ROOT / "tasks.jsonl"
ROLLOUTS = "rollouts.jsonl.xz"  # of each recording
CODE_BASE = "python:3.12-slim"  # what the images of code tasks begin with


@dataclass(frozen=True, slots=True)
class Recording:
    """How a run was made. `env`: the settings that a replay needs for the same prompts."""

    folder: Path
    model: str
    env: dict[str, Any]
    tasks: int
    rollouts: int

    @classmethod
    def read(cls, folder: Path = RECORDING) -> Recording:
        """One of this package."""
        facts = json.loads((folder / "run.json").read_text("utf-8"))
        return cls(folder, facts["model"], facts["env"], facts["tasks"], facts["rollouts"])


def lines(folder: Path = RECORDING) -> Iterator[dict[str, Any]]:
    """What is kept of each recorded rollout."""
    with lzma.open(folder / ROLLOUTS) as file:
        for line in file:
            yield json.loads(line)


def tasks() -> Source:
    """The tasks with answers that were recorded; their files are found wherever this package is installed."""
    return jsonl_tasks(TASKS, name="demo")


def code_tasks() -> Source:
    """Those of `examples/code-tasks` that were recorded."""
    recorded = {line["task_id"] for line in lines(CODE_RECORDING)}
    every = harbor_tasks(code_tasks_folder(), name="demo", split="")
    return Source("demo", lambda: (task for task in every.read() if task.task_id in recorded))


def code_tasks_folder() -> Path:
    """In the installed package, or in the source checkout."""
    installed = ROOT / "code-tasks"
    return installed if installed.is_dir() else ROOT.parents[1] / "examples" / "code-tasks"
