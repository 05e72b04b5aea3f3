"""`orchestrator view`: any run, any groups file, finished or not, and whatever hostile files hold."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.report.from_groups import rollout_lines
from orchestrator.run.directory import RunDirectory
from tests.fakes.plans import a_member
from tests.fakes.synthetic_run import write_synthetic_run
from tests.fakes.written import write_run
from tests.unit.test_report import Elements


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    write_synthetic_run(run)
    assert main(["view", str(run)]) == 0
    return run


def viewed(html: Path) -> Elements:
    return Elements(html.read_text())


def test_a_run_is_summed_up_and_its_report_written_beside_its_groups(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(made)]) == 0
    printed = capsys.readouterr().out
    for label in ("run", "groups", "outcomes", "scores", "tokens", "report"):
        assert f"{label} " in printed
    assert "finished " in printed
    assert "going on" not in printed
    run = viewed(made / "groups.html").block("run")
    assert run["groups"]
    assert f"{len(run['groups'])}, " in printed


def test_a_groups_file_alone_has_what_was_said_and_scored(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone.jsonl").write_bytes((made / "groups.jsonl").read_bytes())
    assert main(["view", str(tmp_path / "alone.jsonl"), "--output", str(tmp_path / "out.html")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.jsonl", "out.html"]
    page = viewed(tmp_path / "out.html")
    whole = viewed(made / "groups.html")
    ours, theirs = page.block("run")["rollouts"], whole.block("run")["rollouts"]
    scored = {row["id"]: row for row in theirs if row["score"] is not None}
    assert ours
    for row in ours:
        known = scored[row["id"]]
        for name in ("score", "outcome", "answer", "tokens", "prompt_tokens", "token_source"):
            assert row[name] == known[name], name
    detail = page.block("detail-0")
    assert detail["completions"]
    assert detail["tokens"]
    assert [page.block("run")[name] for name in ("name", "directory")] == ["alone.jsonl", ""]


def test_a_run_without_its_record_is_shown_from_its_groups(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "groups.jsonl").write_bytes((made / "groups.jsonl").read_bytes())
    (tmp_path / "run.json").write_text('{"version": "0.0.7"}')
    assert main(["view", str(tmp_path)]) == 0
    assert " correct" in capsys.readouterr().out
    run = viewed(tmp_path / "groups.html").block("run")
    assert (run["name"], run["directory"]) == (tmp_path.name, "")
    assert ["version", "0.0.7"] in run["facts"]
    assert any(row["solved"] for row in run["rollouts"])
    assert main(["view", str(tmp_path), "--group", "99999"]) == 2
    assert f"{tmp_path.name} has nothing of the group" in capsys.readouterr().err


def test_side_lines_are_no_rollouts_of_their_own() -> None:
    facts = [{"rollout_id": "a", "segment": 0}, {"rollout_id": "a", "segment": 1}]
    lines = list(rollout_lines({"overrides": facts, "scores": [1.0, 1.0], "messages": None}, 3))
    assert [(line["rollout_id"], line["group"], line["score"]) for line in lines] == [("a", 3, 1.0)]


def test_a_run_that_goes_on_is_shown_as_it_is_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", a_member())
    with closing(RunDirectory(tmp_path / "run", resume=True)):
        assert main(["view", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "still running" in printed
    assert "finished 1" in printed
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("content", [b"", b"\0\xff" * 100, b"[" * 100_000, b'{"a": NaN}\n', b'"text"\n[1]\n'])
def test_what_is_no_run_is_one_line_or_an_empty_page(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "groups.jsonl").write_bytes(content)
    for path in (tmp_path / "groups.jsonl", tmp_path):
        code = main(["view", str(path)])
        printed = capsys.readouterr()
        assert code == (2 if content else 0)
        assert printed.err.count("\n") == (1 if content else 0)


def test_files_that_cannot_be_read_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "rollouts.jsonl")
    os.mkfifo(tmp_path / "run.json")
    for path in (tmp_path / "absent", tmp_path / "pipe", tmp_path):
        assert main(["view", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_run_decides_neither_where_is_written_nor_what_is_shown_as_code(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("mine\n")
    run = tmp_path / "run"
    run.mkdir()
    hostile = {"groups_file": str(elsewhere / "notes.txt"), "config": {"env": {"tokenizer_name": "/\0"}}}
    (run / "run.json").write_text(json.dumps(hostile))
    line = json.loads((made / "rollouts.jsonl").read_text().splitlines()[0])
    (run / "rollouts.jsonl").write_text(json.dumps({**line, "outcome": "\x1b]0;title\x07<script>"}) + "\n")
    assert main(["view", str(run)]) == 0
    assert [path.name for path in elsewhere.iterdir()] == ["notes.txt"]
    assert "\x1b" not in capsys.readouterr().out
    assert (run / "notes.html").is_file()
    assert main(["view", str(run), "--output", str(tmp_path / "no" / "such" / "place.html")]) == 1
    assert "set --output" in capsys.readouterr().err
