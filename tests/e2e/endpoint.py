"""A scripted endpoint in a process of its own, as a real one is."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fakes.runs import ROOT

START_S = 60.0


@dataclass(frozen=True, slots=True)
class ScriptedEndpoint:
    """Where it listens; what it was asked so far."""

    base_url: str

    def completions(self) -> list[dict[str, Any]]:
        """What it served, probes not among it, oldest first."""
        with urllib.request.urlopen(self.base_url.removesuffix("/v1") + "/_log", timeout=30) as answer:
            return [served for served in json.load(answer) if served["call"] is not None and not served["probe"]]

    def completions_of(self, task: str) -> list[dict[str, Any]]:
        """Those of one task, by a part of its text."""
        return [served for served in self.completions() if task in served["call"]["task"]]


@contextmanager
def scripted_endpoint(
    tasks: Mapping[str, Sequence[Sequence[str]]], *arguments: str, **script: Any
) -> Iterator[ScriptedEndpoint]:
    """`tasks`: part of a task's text → its rollouts' turns. `script`: more of a script file's keys."""
    rows = [{"task": task, "rollouts": rollouts} for task, rollouts in tasks.items()]
    with TemporaryDirectory(prefix="script") as directory:
        file = Path(directory) / "script.json"
        file.write_text(json.dumps({"tasks": rows, **script}))
        command = [sys.executable, "-m", "tests.fakes.inference", "--script", str(file), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], START_S)[0], "the endpoint does not start"
            yield ScriptedEndpoint(process.stdout.readline().strip())
        finally:
            process.kill()
            process.wait()


def says(thought: str, code: str) -> str:
    """One turn as models of smolagents write it."""
    return f"Thought: {thought}\n<code>\n{code}\n</code>"


def answers(value: str) -> str:
    """The last turn."""
    return says("That is it.", f"final_answer({value})")
