"""`--json`: one object of the documented shape on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.grading.measured import checks_answer
from orchestrator.types import TaskCheck
from tests.fakes.recorded_run import write_recorded_run
from tests.fakes.tokenizer import tokenizer_folder

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"


def documented(command: str) -> set[str]:
    [row] = re.findall(
        rf"^\| `{command}` \| (.*) \|$", DOCS.read_text().partition("Answers for programs")[2], re.M
    )
    return set(re.findall(r"`([a-z_]+)`", row))


def answer_of(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recorded_run(tmp_path / "a")
    answer, _ = answer_of(capsys, "runs", tmp_path)
    assert {*answer, *answer["runs"][0]} == documented("runs")


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "a")
    answer, errors = answer_of(capsys, "compare", run, run)
    assert set(answer) == documented("compare")
    assert errors == ""


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "a")
    (run / "groups.jsonl").write_text('{"tokens": []}\n')
    answer, errors = answer_of(capsys, "verify", run, code=1)
    assert {*answer, *answer["checks"][0]} == documented("verify")
    assert answer["violations"] > 0
    shape = next(check for check in answer["checks"] if check["check"] == "shape")
    assert shape["wrong"] > 0
    assert shape["first_wrong"][0].startswith("groups.jsonl:1")
    assert "violations" in errors


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("doctor", "--env.launcher", "process", "--env.tokenizer_name", tokenizer_folder())
    answer, errors = answer_of(capsys, *argv)
    levels = {"ok", "warn", "fail"}
    assert {*answer, *answer["findings"][0]} == documented("doctor") - levels
    assert set(answer["counts"]) == levels
    assert answer["usable"] is True
    assert sum(answer["counts"].values()) == len(answer["findings"]) == errors.count("\n") - 1
    assert re.search(r"^\d+ ok, \d+ warnings?, 0 failures$", errors, re.M)


def test_check_tasks() -> None:
    good, odd = TaskCheck("c", panel={"a": 0.0}), "it has no grader"
    answer = checks_answer("jsonl:t", {"good": good, "odd": odd}, None)
    assert {*answer, *answer["tasks"][0], *answer["tasks"][1]} == documented("check-tasks")
    assert [task["passed"] for task in answer["tasks"]] == [True, None]
    assert json.loads(json.dumps(answer)) is not None
