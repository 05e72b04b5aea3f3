"""The `grader` of a row: what is taken, and what is refused by name. And what is known of a task's solution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.tasks.checks import checks_file, read_checks
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Case, Grader, Task

CASE = {"stdin": "1\n", "expected": "2"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "test.sh").write_text("#!/bin/sh\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def task_of(root: Path | None, grader: object, **row: Any) -> Task | BadTask:
    row = {"task_id": "t", "question": "What?", "grader": grader, **row}
    return make_task(row, source="test", place="line 1", root=root)


def grader_of(root: Path | None, grader: object) -> Grader:
    task = task_of(root, grader)
    assert isinstance(task, Task), task
    assert task.answer is None
    assert task.grader is not None
    return task.grader


def test_each_kind_is_read(root: Path) -> None:
    harbor = {"kind": "harbor", "tests": "checks", "timeout": 5, "user": "me", "cwd": "/app/", "env": {"A": "b"}}
    assert grader_of(root, harbor) == Grader(
        "harbor", str(root / "checks"), timeout_s=5, user="me", cwd="/app", environment={"A": "b"}
    )
    command = {"kind": "command", "command": "make test", "artifacts": ["/app/out/", "/a"]}
    assert grader_of(None, command) == Grader(
        "command", command=("/bin/sh", "-c", "make test", "sh"), declared=("/app/out", "/a")
    )
    cases = {"kind": "io", "command": ["./a"], "cases": [CASE, {"expected": "", "arguments": ["-v", 3]}]}
    assert grader_of(None, cases) == Grader(
        "io", command=("./a",), cases=(Case((), "1\n", "2"), Case(("-v", "3"), "", ""))
    )


def test_a_text_for_the_shell_gets_the_arguments_of_a_case() -> None:
    assert grader_of(None, {"kind": "io", "command": "python3 a.py", "cases": [CASE]}).command == (
        *("/bin/sh", "-c", 'python3 a.py "$@"', "sh"),
    )


def test_an_answer_beside_a_grader_is_kept_and_no_grader_is_none(root: Path) -> None:
    task = task_of(root, {"kind": "command", "command": "true"}, answer="42")
    assert isinstance(task, Task)
    assert task.answer == "42"
    plain = task_of(root, None, answer="42")
    assert isinstance(plain, Task)
    assert plain.grader is None


@pytest.mark.parametrize(
    ("grader", "why"),
    [
        ("tests", "grader must be an object, not str"),
        ({"tests": "checks"}, "grader.kind None is unknown; valid are command, io, harbor"),
        ({"kind": "harbor"}, "grader.tests is missing: the folder with test.sh"),
        ({"kind": "harbor", "tests": "empty"}, "grader.tests 'empty' has no test.sh"),
        ({"kind": "harbor", "tests": "checks/test.sh"}, "grader.tests 'checks/test.sh' is no folder"),
        ({"kind": "harbor", "tests": "../.."}, "grader.tests '../..' leads out of the dataset's folder"),
        ({"kind": "harbor", "tests": "checks", "cases": [CASE]}, "grader.cases is unknown for the kind harbor"),
        ({"kind": "command"}, "grader.command is missing"),
        ({"kind": "command", "command": []}, "grader.command is missing"),
        ({"kind": "command", "command": ["a\0b"]}, "grader.command holds a NUL character"),
        ({"kind": "command", "command": ["a"], "timeout": 0}, "grader.timeout must be a number of seconds"),
        ({"kind": "command", "command": ["a"], "timeout": True}, "grader.timeout must be a number of seconds"),
        (
            {"kind": "command", "command": ["a"], "artifacts": ["app"]},
            "grader.artifacts 'app' must be an absolute",
        ),
        ({"kind": "command", "command": ["a"], "artifacts": ["/a/../b"]}, "without `..`"),
        ({"kind": "command", "command": ["a"], "env": {"LD_PRELOAD": "x"}}, "env sets LD_PRELOAD"),
        ({"kind": "io", "command": ["a"], "cases": []}, "grader.cases must be a list of 1 to 200 objects"),
        ({"kind": "io", "command": ["a"], "cases": [{"stdin": "1"}]}, "grader.cases[0] must be an object"),
        (
            {"kind": "io", "command": ["a"], "cases": [{**CASE, "output": "1"}]},
            "grader.cases[0] must be an object",
        ),
        ({"kind": "io", "command": ["a"], "cases": [CASE] * 201}, "grader.cases must be a list of 1 to 200"),
    ],
)
def test_what_no_grader_can_be_made_of_is_a_bad_task_that_says_why(root: Path, grader: object, why: str) -> None:
    task = task_of(root, grader)
    assert isinstance(task, BadTask)
    assert why in task.reason


def test_the_file_lies_beside_the_tasks(tmp_path: Path) -> None:
    assert checks_file(f"jsonl:{tmp_path}/tasks.jsonl") == tmp_path / "tasks.jsonl.checks.json"
    assert checks_file(f"harbor:{tmp_path}") == tmp_path / "checks.json"
    assert checks_file("gaia") is None


def known(checked: str) -> str:
    return f'{{"schema": 2, "tasks": {{"t": {{"content": "c", "checked": {checked}}}}}}}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "its schema is not 2"),
        ('{"schema": 1, "tasks": {}}', "its schema is not 2"),
        (known('{"scope": 3}'), "array"),
        (known('{"scope": ["../etc"]}'), "absolute path"),
        (known('{"takeovers": ["/a/../.."]}'), "absolute path"),
        (known('{"layer": "/root"}'), "no digest"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_another_file_of_that_name_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (file := tmp_path / "checks.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_checks(file)
