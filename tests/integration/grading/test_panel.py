"""The panel's policies are cheats: most of them win where the tests lie in the agent's own sandbox. A solution
that leaves bytecode of Python's library does not open the way for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.grading.check import TaskChecker
from orchestrator.grading.grade import with_tests
from orchestrator.grading.panel import PLANTED, Output, compiled, policies
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.workspaces import Workspaces
from orchestrator.scorers.grader import GraderScorer
from orchestrator.types import Grader, SandboxSpec, Task
from tests.integration.grading.attacks import PYTHON, SOLUTION
from tests.integration.grading.test_attacks import PATH, in_place, launcher, pytestmark, spec, tests, workspaces

__all__ = ("launcher", "pytestmark", "spec", "tests", "workspaces")  # fixtures and marks
SCRIPTS = policies([Output("/app/calc.py", True)], "/app", library=False)
# Of the others the tests of this task take no notice: their bash is another one, they print what their own Python
# says, and what they are given is laid over what was planted.
WINS = {"background writer", "bytecode", "conftest.py", "patched pytest", "programs in PATH", "pytest.ini"}
WINS |= {".pth", "sitecustomize", "test.sh"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WINS))
async def test_a_policy_wins_where_the_tests_are_beside_it(
    name: str, launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces
) -> None:
    assert await in_place(launcher, spec, SCRIPTS[name], tests, workspaces) in ("1", '{"reward": 1}')


@pytest.mark.full
async def test_a_task_is_checked_with_all_of_them_and_its_solution_may_leave_bytecode(
    launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces, tmp_path: Path
) -> None:
    (solution := tmp_path / "solution").mkdir()
    bytecode = (
        "import json, os, py_compile, re, subprocess\n"
        "for module in (json, os, re, subprocess): py_compile.compile(module.__file__)"
    )
    (solution / "solve.sh").write_text(f"#!/bin/sh\n{SOLUTION}\n{PYTHON} -c '{bytecode}'\n")
    (folder := tmp_path / "planted").mkdir()
    library = str(workspaces.layer(folder, PLANTED, writable=False)) if compiled(folder) else None
    grader = Grader("harbor", tests=str(tests), environment=PATH, timeout_s=60)
    task = with_tests(replace(Task("calc", "Add.", grader=grader), environment=PATH), workspaces)
    laid = workspaces.layer(solution, "/solution", writable=False)
    checker = TaskChecker(
        task, "c", spec, launcher, GraderScorer().reward, solution=str(laid), library=library, solve_s=60
    )
    check = await checker.check()
    assert check.failures == ()
    assert check.checked.scope == ("/app",)
    assert set(check.panel.values()) == {0}
    assert len(check.panel) == len(SCRIPTS) + (library is not None)
    assert check.runs_delivered
