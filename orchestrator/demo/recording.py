"""The recorded run: its settings, rollouts and tasks. `bench/recording.py` makes them from a finished run."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.tasks.base import Source
from orchestrator.tasks.jsonl import jsonl_tasks

ROOT = Path(__file__).resolve().parent
RECORDING = ROOT / "recording"
TASKS = ROOT / "tasks.jsonl"
ROLLOUTS = RECORDING / "rollouts.jsonl.xz"


@dataclass(frozen=True, slots=True)
class Recording:
    """How the run was made. `env`: the settings that a replay needs for the same prompts."""

    model: str
    env: dict[str, Any]
    tasks: int
    rollouts: int

    @classmethod
    def read(cls) -> Recording:
        """The recording in this package."""
        facts = json.loads((RECORDING / "run.json").read_text("utf-8"))
        return cls(facts["model"], facts["env"], facts["tasks"], facts["rollouts"])


def lines() -> Iterator[dict[str, Any]]:
    """What is kept of each recorded rollout."""
    with lzma.open(ROLLOUTS) as file:
        for line in file:
            yield json.loads(line)


def tasks() -> Source:
    """The tasks of the recording; their files are found wherever this package is installed."""
    return jsonl_tasks(TASKS, name="demo")
