"""`orchestrator runs`: what it says of runs that ended, were stopped, killed or go on, and that it stays quick."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.commands import runs as command
from orchestrator.run.ending import END_FILE, ending
from orchestrator.run.frames import Packer
from orchestrator.run.tally import Tally
from tests.fakes.recorded_run import write_recorded_run


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], list[dict[str, Any]]]:
    def list_runs(folder: Path) -> list[dict[str, Any]]:
        assert main(["runs", str(folder), "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        answer = json.loads(captured.out)
        assert answer["folder"] == str(folder)
        return list(answer["runs"])

    return list_runs


def tally_of(run: Path) -> Tally:
    return Tally.read(run / "rollouts.jsonl", None)


def test_a_run_without_an_end_is_counted_from_its_files(tmp_path: Path, listed) -> None:
    run = write_recorded_run(tmp_path / "a")
    (run / "groups.jsonl").write_text("{}\n{}\n{}\n")
    [one] = listed(tmp_path)
    assert one | {"started_at": 0} == {
        "run": str(run), "started_at": 0, "command": "process", "model": "scripted",
        "groups": 3, "scored": 15, "solved": 6, "cost": None, "state": "broken off",
    }  # fmt: skip
    assert [found["run"] for found in listed(run)] == [str(run)]  # the run itself, too


def test_a_group_counts_once_however_many_lines_it_has_and_a_torn_one_not_at_all(tmp_path: Path, listed) -> None:
    packed, sides = (write_recorded_run(tmp_path / name) for name in ("packed", "sides"))
    (packed / "groups.jsonl.zst").write_bytes(Packer().packed([b"{}\n", b"{}\n"]))  # its frame is not closed
    description = json.loads((sides / "run.json").read_bytes())
    description["config"]["env"]["trained_segments"] = "all_segments"
    (sides / "run.json").write_text(json.dumps(description))
    lines = [{"overrides": [{"segment": segment, "main_segment": 0}]} for segment in (0, 1, 2, 0)]
    (sides / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"tok')
    assert [one["groups"] for one in listed(tmp_path)] == [2, 2]


def test_the_state_is_how_it_ended_and_counts_are_those_of_the_end(tmp_path: Path, listed) -> None:
    ended, stopped, broken = (write_recorded_run(tmp_path / name) for name in ("a", "b", "c"))
    with ending(ended, tally_of(ended), lambda: False):
        pass
    with ending(stopped, tally_of(stopped), lambda: True):
        pass
    with suppress(RuntimeError), ending(broken, tally_of(broken), lambda: False):
        raise RuntimeError
    (ended / "rollouts.jsonl").unlink()  # it is not read
    assert [(one["state"], one["solved"]) for one in listed(tmp_path)] == [
        ("ended", 6),
        ("stopped", 6),
        ("stopped", 6),
    ]


def test_a_run_goes_on_while_it_is_locked_and_its_old_end_is_gone(tmp_path: Path, listed) -> None:
    run = write_recorded_run(tmp_path / "a")
    with ending(run, Tally(), lambda: False):
        pass
    with ending(run, tally_of(run), lambda: False), (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not (run / END_FILE).exists()
        [one] = listed(tmp_path)
        assert (one["state"], one["solved"]) == ("running", 6)


def test_costs_are_told_by_prices_that_are_given_afterwards(tmp_path: Path, capsys) -> None:
    ended, killed, other = (write_recorded_run(tmp_path / name) for name in ("a", "b", "c"))
    with ending(ended, tally_of(ended), lambda: False):
        pass
    (other / "run.json").write_text((other / "run.json").read_text().replace('"scripted"', '"another"'))
    (table := tmp_path / "prices.yaml").write_text("scripted: {prompt: 1, completion: 10}\n")
    assert main(["runs", str(tmp_path), "--json", "--env.price_table", str(table)]) == 0
    costs = {Path(one["run"]).name: one["cost"] for one in json.loads(capsys.readouterr().out)["runs"]}
    lines = [json.loads(line) for line in (killed / "rollouts.jsonl").read_bytes().splitlines()]
    made = [one for line in lines for one in line.get("completions", ())]
    cost = sum(one["prompt_tokens"] + 10 * one["completion_tokens"] for one in made) / 1e6
    assert costs == {"a": pytest.approx(cost), "b": pytest.approx(cost), "c": None}


def test_a_full_disk_costs_only_the_end(tmp_path: Path) -> None:
    (tmp_path / (END_FILE + ".part")).mkdir()
    with ending(tmp_path, Tally(), lambda: False):
        pass
    assert not (tmp_path / END_FILE).exists()


def test_a_run_without_a_groups_file_is_not_said_to_take_long(tmp_path: Path, capsys) -> None:
    write_recorded_run(tmp_path / "evaluation")
    assert main(["runs", str(tmp_path)]) == 0
    assert "or there is no groups file" in capsys.readouterr().out


def test_large_files_are_not_read(
    tmp_path: Path, listed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_recorded_run(tmp_path / "a")
    (run / "groups.jsonl").write_text("{}\n")
    monkeypatch.setattr(command, "RECORD_BYTES", 10)
    [one] = listed(tmp_path)
    assert (one["groups"], one["scored"], one["solved"]) == (1, None, None)
    monkeypatch.setattr(command, "GROUPS_BYTES", 1)
    assert listed(tmp_path)[0]["groups"] is None
    assert main(["runs", str(tmp_path)]) == 0
    assert "not counted, as that would take long" in capsys.readouterr().out


def test_a_foreign_end_cannot_break_the_list_nor_the_terminal(
    tmp_path: Path, listed, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_recorded_run(tmp_path / "a\x1b[31m")
    (run / END_FILE).write_text(json.dumps({"state": "\x1b[2J", "groups": -1, "solved": "x", "cost": "1e999"}))
    [one] = listed(tmp_path)
    assert (one["state"], one["groups"], one["solved"], one["cost"]) == ("ended", 0, 0, None)
    assert main(["runs", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_commands_are_told_by_what_runs_leave(tmp_path: Path, listed) -> None:
    wanted = {}
    for name, facts, file in (
        ("e", {"command": "evaluate"}, None),
        ("d", {"tasks": "python:orchestrator.demo.recording:tasks"}, None),
        ("c", {"tasks": "python:orchestrator.demo.recording:code_tasks"}, None),
        ("l", {"tasks": "tasks of a program"}, None),
        ("s", {}, "position.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
        if file:
            (tmp_path / name / file).write_text("{}")
        wanted[str(tmp_path / name)] = {"e": "evaluate", "d": "demo", "c": "demo", "l": "library", "s": "serve"}[
            name
        ]
    (tmp_path / "no-run").mkdir()
    found = listed(tmp_path)
    assert {one["run"]: one["command"] for one in found} == wanted
    assert {one["command"]: one["state"] for one in found} == {
        "evaluate": "broken off", "demo": "broken off", "library": "over", "serve": "broken off",
    }  # fmt: skip


def test_a_folder_without_runs_says_so_and_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert "runs cannot be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no run in runs\n"
