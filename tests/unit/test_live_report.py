"""What a live page is told: each line once, and in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.report.live import LiveReport
from orchestrator.run.line import attempt_line, bad_task_line
from orchestrator.run.lines import dumps
from orchestrator.types import BadTask
from tests.fakes.plans import a_member


def appended(file: Path, *values: object) -> None:
    with file.open("ab") as end:
        end.writelines(dumps(value) + b"\n" for value in values)


def attempts(group: int, size: int = 2) -> list[dict[str, object]]:
    lines = [attempt_line(a_member(index)) for index in range(size)]
    return [line | {"group": group, "rollout_id": f"g{group:06d}-r{n:02d}-a0"} for n, line in enumerate(lines)]


def report(folder: Path) -> LiveReport:
    return LiveReport(folder, lambda: None)


def test_only_what_is_new_is_told_with_all_of_its_group(tmp_path: Path) -> None:
    record, live = tmp_path / "rollouts.jsonl", report(tmp_path)
    assert live.update(0)["groups"] == [], "there is no file yet"
    first, second = attempts(0), attempts(1)
    appended(record, first[0], *second)
    told = live.update(0)
    assert [group["number"] for group in told["groups"]] == [0, 1]
    appended(record, first[1])
    more = live.update(told["version"])
    assert [group["number"] for group in more["groups"]] == [0]
    assert len(more["rollouts"]) == 2
    assert live.update(more["version"])["groups"] == []
    assert len(live.update(0)["rollouts"]) == 4


def test_a_line_under_way_is_left_for_the_next_time(tmp_path: Path) -> None:
    record, live = tmp_path / "rollouts.jsonl", report(tmp_path)
    whole = dumps(attempts(0)[0]) + b"\n"
    for size in range(0, len(whole), 400):
        record.write_bytes(whole[:size])
        told = live.update(0)
        assert (told["rollouts"], told["skipped"]["rollout_lines"]) == ([], 0)
    record.write_bytes(whole)
    assert len(live.update(0)["rollouts"]) == 1


def test_a_group_is_under_way_until_it_is_written_or_dropped(tmp_path: Path) -> None:
    live = report(tmp_path)
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1), *attempts(2))
    before = live.update(0)
    assert [(g["written"], g["dropped"]) for g in before["groups"]] == [(False, "")] * 3
    appended(tmp_path / "groups.jsonl", {"overrides": [{"rollout_id": "g000001-r00-a0"}]})
    appended(tmp_path / "dropped.jsonl", {"schema": 1, "group": 2, "task_id": "t", "reason": "of equal scores"})
    told = live.update(before["version"])
    assert {g["number"]: (g["written"], g["dropped"]) for g in told["groups"]} == {
        1: (True, ""),
        2: (False, "of equal scores"),
    }


def test_bad_tasks_are_told_when_there_are_more(tmp_path: Path) -> None:
    record, live = tmp_path / "rollouts.jsonl", report(tmp_path)
    appended(record, bad_task_line(BadTask("a", "torn"), 0))
    told = live.update(0)
    assert len(told["bad_tasks"]) == 1
    assert "bad_tasks" not in live.update(told["version"])
    appended(record, bad_task_line(BadTask("b", "torn"), 1))
    assert len(live.update(told["version"])["bad_tasks"]) == 2


def test_of_a_very_long_run_the_first_groups_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.report.summary.MOST_ATTEMPTS", 20)
    live = report(tmp_path)
    for first in range(0, 2000, 100):
        appended(tmp_path / "rollouts.jsonl", *(line for n in range(first, first + 100) for line in attempts(n)))
        told = live.update(0)
    assert [group["number"] for group in told["groups"]] == list(range(1990, 2000))
    assert (told["forgotten"], told["forgotten_groups"]) == (3980, 1990)
    assert len(live._changed) < 1100
    assert live.details("g000003-r00-a0") is None
    assert live.details("g001999-r01-a0") is not None


def test_of_a_record_older_than_the_page_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appended(tmp_path / "rollouts.jsonl", *(line for n in range(100) for line in attempts(n)))
    size = len(json.dumps(attempts(0)[0])) * 10
    monkeypatch.setattr("orchestrator.report.live.MAX_BEHIND_BYTES", size)
    told = report(tmp_path).update(0)
    assert 3 <= len(told["groups"]) <= 7
    assert any("older than this page" in note for note in told["notes"])
    assert told["skipped"]["rollout_lines"] == 0


def test_a_value_that_cannot_be_shown_costs_nothing_else(tmp_path: Path) -> None:
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    live = report(tmp_path)
    appended(tmp_path / "rollouts.jsonl", *attempts(0))
    nested = json.dumps(attempts(1)[0] | {"reference": deep}).encode() + b"\n"
    with (tmp_path / "rollouts.jsonl").open("ab") as end:
        end.write(nested)
    told = live.update(0)
    assert [group["number"] for group in told["groups"]] == [0, 1]
    assert told["groups"][1]["reference"] == "(list, too deep to show)"


def test_why_a_group_was_dropped_may_be_there_before_its_rollouts(tmp_path: Path) -> None:
    live = report(tmp_path)
    drops = tmp_path / "dropped.jsonl"
    appended(drops, {"group": 1, "reason": "first"}, {"group": "0", "reason": "x"}, {"reason": "x"}, {"group": -1})
    assert live.update(0)["groups"] == []
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    assert [group["dropped"] for group in live.update(0)["groups"]] == ["", "first"]
