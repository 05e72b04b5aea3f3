"""What a served page is told: from an index that is made once, goes on with the record, and is never believed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.report import live as live_report
from orchestrator.report import read_run
from orchestrator.report.index import RunIndex
from orchestrator.report.live import LiveReport
from orchestrator.report.tables import INDEX_FILE
from orchestrator.run.line import attempt_line, bad_task_line
from orchestrator.run.lines import dumps
from orchestrator.run.prices import NO_PRICES, PriceList
from orchestrator.types import BadTask
from tests.fakes.plans import a_member
from tests.fakes.synthetic_run import write_synthetic_run

Open = Callable[..., LiveReport]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens reports, and closes them in the end."""
    reports: list[LiveReport] = []

    def open_report(folder: Path, price_list: PriceList = NO_PRICES) -> LiveReport:
        reports.append(LiveReport(folder, lambda: None, price_list))
        return reports[-1]

    yield open_report
    for one in reports:
        one.close()


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(autouse=True)
def all_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still meanwhile."""
    monkeypatch.setattr(live_report, "STEP_S", 3600.0)


@pytest.fixture
def lines_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each line of rollouts.jsonl that is indexed."""
    read: list[int] = []
    hear = RunIndex._hear

    def heard(index: RunIndex, row: dict[str, object], line: dict[str, object]) -> None:
        read.append(1)
        hear(index, row, line)

    monkeypatch.setattr(RunIndex, "_hear", heard)
    return read


def appended(file: Path, *values: object) -> None:
    with file.open("ab") as end:
        end.writelines(dumps(value) + b"\n" for value in values)


def attempts(group: int, size: int = 2, **changes: object) -> list[dict[str, object]]:
    lines = [attempt_line(a_member(index)) for index in range(size)]
    return [
        line | {"group": group, "rollout_id": f"g{group:06d}-r{n:02d}-a0"} | changes
        for n, line in enumerate(lines)
    ]


def numbers(report: LiveReport, **given: str) -> list[int]:
    return [group["number"] for group in report.groups(given, 0, 1000)["groups"]]


def figures(report: LiveReport) -> dict[str, object]:
    return json.loads(dumps(report.update()["totals"]))


def of_all(folder: Path) -> dict[str, object]:
    """The same figures as the report in a file has them."""
    return json.loads(dumps(read_run(folder, folder / "groups.jsonl").totals.shown()))


def test_its_figures_rows_and_details_are_those_of_the_report_in_a_file(tmp_path: Path, opened: Open) -> None:
    write_synthetic_run(tmp_path)
    run, live = read_run(tmp_path, tmp_path / "groups.jsonl"), opened(tmp_path)
    for report in (live, opened(shutil.copytree(tmp_path, tmp_path / "copy"))):
        told = json.loads(dumps(report.update()))
        for name, value in json.loads(dumps(run.overview())).items():
            assert name in ("name", "directory") or told[name] == value, name
        shown = json.loads(dumps(report.groups({}, 0, 1000)))
        assert shown["groups"] == json.loads(dumps([run.groups[number] for number in sorted(run.groups)]))
        rows = {row["id"]: row for row in shown["rollouts"]}
        assert rows == json.loads(dumps(dict(run.rollouts)))
        ended = json.loads(dumps(report.ended(0)))["rows"]
        assert {row["id"]: row.items() <= rows[row["id"]].items() for row in ended} == dict.fromkeys(rows, True)
    for name in run.rollouts:
        details = live.details(name)
        assert details is not None
        assert (details["tokens"] is not None) == (name in run.written)


def test_a_second_look_reads_nothing_again(tmp_path: Path, opened: Open, lines_read: list[int]) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    first = opened(tmp_path)
    assert figures(first) == figures(first) == of_all(tmp_path)
    first.close()
    second = opened(tmp_path)
    assert (figures(second), numbers(second)) == (of_all(tmp_path), [0, 1])
    assert len(lines_read) == 4


def test_what_an_evaluation_and_a_curriculum_counted_is_there_again(
    tmp_path: Path, opened: Open, lines_read: list[int]
) -> None:
    config = {"env": {"group_size": 2}}
    (tmp_path / "run.json").write_text(json.dumps({"command": "evaluate", "config": config}))
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1, task_id="another"))
    drawn = {"schema": 1, "group": 0, "task_id": "a", "scored": 2, "solved": 1, "differ": True, "pool": "new"}
    appended(tmp_path / "curriculum.jsonl", drawn)

    def told(report: LiveReport) -> list[object]:
        update = json.loads(dumps(report.update()))
        return [update["evaluation"], update["facts"]]

    for _ in range(2):
        with closing(opened(tmp_path)) as live:
            whole = json.loads(dumps(read_run(tmp_path, None).overview()))
            assert told(live) == [whole["evaluation"], whole["facts"]]
            assert whole["evaluation"]["tasks"] == 2
            assert ["pool: new", "1 tasks, drawn 1 times, 1 informative"] in whole["facts"]
    with closing(opened(tmp_path)) as live:
        appended(tmp_path / "curriculum.jsonl", drawn | {"group": 1, "task_id": "b"})
        assert ["pool: new", "2 tasks, drawn 2 times, 2 informative"] in told(live)[1]
    assert len(lines_read) == 4


def test_what_was_added_since_is_read_and_nothing_else(
    tmp_path: Path, opened: Open, lines_read: list[int]
) -> None:
    record, groups = tmp_path / "rollouts.jsonl", tmp_path / "groups.jsonl"
    first, second = attempts(0), attempts(1)
    appended(record, first[0])
    live = opened(tmp_path)
    assert numbers(live) == [], "nothing was read yet"
    assert figures(live) == of_all(tmp_path)
    version = live.update()["version"]
    appended(record, first[1], *second)
    appended(groups, {"overrides": [{"rollout_id": first[1]["rollout_id"]}], "scores": [1.0]})
    assert figures(live) == of_all(tmp_path)
    assert live.update()["version"] > version
    live.close()
    appended(record, *attempts(2))
    again = opened(tmp_path)
    assert figures(again) == of_all(tmp_path)
    assert [group["written"] for group in again.groups({}, 0, 9)["groups"]] == [True, False, False]
    assert len(lines_read) == 6


def changed_in_place(record: Path) -> None:
    text = record.read_bytes()
    record.write_bytes(text.replace(b'"outcome":"finished"', b'"outcome":"max_step"', 1))


def changed_before_it_grew(record: Path) -> None:
    changed_in_place(record)
    appended(record, *attempts(8))


def cut(record: Path) -> None:
    record.write_bytes(record.read_bytes().splitlines(keepends=True)[0])


def replaced(record: Path) -> None:
    fresh = record.with_suffix(".new")
    appended(fresh, *attempts(6), *attempts(7), *attempts(8))
    fresh.replace(record)


def packed(record: Path) -> None:
    from orchestrator.run.frames import Packer

    packer = Packer()
    lines = record.read_bytes().splitlines(keepends=True)
    record.with_name("rollouts.jsonl.zst").write_bytes(packer.packed(lines) + packer.closed())
    record.unlink()


@pytest.mark.parametrize("change", [changed_in_place, changed_before_it_grew, cut, replaced, packed])
@pytest.mark.parametrize("open_meanwhile", [True, False])
def test_of_another_record_the_index_is_made_anew(
    tmp_path: Path, opened: Open, change: Callable[[Path], None], open_meanwhile: bool
) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    live = opened(tmp_path)
    before = figures(live)
    if not open_meanwhile:
        live.close()
    change(tmp_path / "rollouts.jsonl")
    live = live if open_meanwhile else opened(tmp_path)
    assert figures(live) == of_all(tmp_path)
    assert before != of_all(tmp_path) or change is packed
    shown = {row["id"] for row in live.groups({}, 0, 99)["rollouts"]}
    assert shown == set(read_run(tmp_path, None).rollouts)


def test_prices_that_are_others_make_it_anew(tmp_path: Path, opened: Open) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0))
    (tmp_path / "run.json").write_text("{}")
    free = opened(tmp_path)
    assert free.update()["totals"]["cost"] is None
    free.close()
    priced = opened(tmp_path, PriceList((1e6, 1e6)))
    assert priced.update()["totals"]["cost"] > 0


def test_a_line_under_way_is_left_for_the_next_time(tmp_path: Path, opened: Open) -> None:
    record, live = tmp_path / "rollouts.jsonl", opened(tmp_path)
    whole = dumps(attempts(0)[0]) + b"\n"
    for size in range(0, len(whole), 400):
        record.write_bytes(whole[:size])
        told = live.update()
        assert told["all_groups"] == 0
        assert told["skipped"]["rollout_lines"] == (size > 0), "nobody writes it any more"
    record.write_bytes(whole)
    assert (live.update()["all_groups"], live.update()["skipped"]["rollout_lines"]) == (1, 0)


def written_by_others(index: Path) -> None:
    with closing(sqlite3.connect(index)) as database, database:
        database.execute("UPDATE groups SET value = replace(value, 'q', 'owned')")
        database.execute("CREATE TRIGGER owned AFTER UPDATE ON state BEGIN DELETE FROM groups; END")


def torn(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:-5000] + bytes(5000))


def a_copy(index: Path) -> None:
    fresh = index.with_suffix(".new")
    shutil.copy2(index, fresh)
    fresh.replace(index)


def no_database(index: Path) -> None:
    index.write_text("no database")


def a_link(index: Path) -> None:
    index.unlink()
    (index.parent / "outside").write_text("of the user")
    index.symlink_to("outside")


def a_linked_proof(index: Path) -> None:
    proof = index.with_name(INDEX_FILE + ".proof")
    proof.unlink()
    (index.parent / "outside").write_text("of the user")
    proof.symlink_to("outside")


def a_folder(index: Path) -> None:
    index.unlink()
    index.mkdir()


def a_hot_journal(index: Path) -> None:
    index.with_name(INDEX_FILE + "-journal").write_bytes(os.urandom(4096))


def an_old_proof(index: Path) -> None:
    written_by_others(index)
    os.utime(index, ns=(0, 0))


def a_forged_proof(index: Path) -> None:
    written_by_others(index)
    proof, how = index.with_name(INDEX_FILE + ".proof"), index.stat()
    told = json.loads(proof.read_text())
    proof.write_text(json.dumps(told | {"size": how.st_size, "changed_ns": how.st_ctime_ns}))


@pytest.mark.parametrize(
    "harm",
    [
        written_by_others,
        torn,
        a_copy,
        no_database,
        a_link,
        a_linked_proof,
        a_folder,
        a_hot_journal,
        an_old_proof,
        a_forged_proof,
    ],
)
def test_an_index_that_this_user_did_not_leave_so_is_not_opened(
    tmp_path: Path, opened: Open, harm: Callable[[Path], None], lines_read: list[int]
) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    first = opened(tmp_path)
    figures(first)
    first.close()
    harm(tmp_path / INDEX_FILE)
    again = opened(tmp_path)
    assert (figures(again), numbers(again)) == (of_all(tmp_path), [0, 1])
    assert "owned" not in json.dumps(again.groups({}, 0, 9))
    assert len(lines_read) == (4 if harm is a_hot_journal else 8)
    if (outside := tmp_path / "outside").exists():
        assert outside.read_text() == "of the user"


def test_one_that_a_kill_left_is_made_anew(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    killed = opened(tmp_path)
    figures(killed)
    appended(tmp_path / "rollouts.jsonl", *attempts(2))
    with monkeypatch.context() as patched:
        patched.setattr(RunIndex, "_find", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            killed.update()
    proof = (tmp_path / f"{INDEX_FILE}.proof").read_bytes()
    assert proof == b""
    assert figures(killed) == of_all(tmp_path), "and by the process that failed"


def test_two_may_look_at_once_and_where_nothing_can_be_kept(tmp_path: Path, opened: Open) -> None:
    appended(tmp_path / "rollouts.jsonl", *attempts(0))
    one, other = opened(tmp_path), opened(tmp_path)
    appended(tmp_path / "rollouts.jsonl", *attempts(1))
    assert figures(one) == figures(other) == of_all(tmp_path)


def test_a_group_is_under_way_until_it_is_written_or_dropped(tmp_path: Path, opened: Open) -> None:
    live = opened(tmp_path)
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1), *attempts(2))
    assert (live.update()["done"], live.update()["under_way"]) == (0, 3)
    appended(tmp_path / "groups.jsonl", {"overrides": [{"rollout_id": "g000001-r00-a0"}]})
    appended(tmp_path / "dropped.jsonl", {"schema": 1, "group": 2, "task_id": "t", "reason": "of equal scores"})
    told = live.update(began=1e9)
    assert (told["done"], told["under_way"]) == (2, 1)
    assert [(g["written"], g["dropped"]) for g in live.groups({}, 0, 9)["groups"]] == [
        (False, ""),
        (True, ""),
        (False, "of equal scores"),
    ]
    assert numbers(live, which="written") == [1]
    assert numbers(live, which="dropped") == [0, 2]


def test_why_a_group_was_dropped_may_be_there_before_its_rollouts(tmp_path: Path, opened: Open) -> None:
    live = opened(tmp_path)
    drops = tmp_path / "dropped.jsonl"
    appended(drops, {"group": 1, "reason": "first"}, {"group": "0", "reason": "x"}, {"reason": "x"}, {"group": -1})
    appended(drops, {"group": 1 << 63, "reason": "x"})
    assert live.update()["all_groups"] == 0
    live.close()
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *attempts(1))
    again = opened(tmp_path)
    again.update()
    assert [group["dropped"] for group in again.groups({}, 0, 9)["groups"]] == ["", "first"]


def test_bad_tasks_are_told(tmp_path: Path, opened: Open) -> None:
    appended(tmp_path / "rollouts.jsonl", bad_task_line(BadTask("a", "torn"), 0))
    assert len(opened(tmp_path).update()["bad_tasks"]) == 1


def test_groups_come_in_parts_with_their_neighbours(tmp_path: Path, opened: Open) -> None:
    for number in range(25):
        appended(tmp_path / "rollouts.jsonl", *attempts(number, score=number % 5 / 5))
    live = opened(tmp_path)
    live.update()
    part = live.groups({}, 10, 5)
    assert ([group["number"] for group in part["groups"]], part["count"]) == ([10, 11, 12, 13, 14], 25)
    falling = numbers(live, sort="mean", down="1")
    assert falling == [*range(4, 25, 5), *range(3, 25, 5), *range(2, 25, 5), *range(1, 25, 5), *range(0, 25, 5)]
    group = live.group({"sort": "mean", "down": "1"}, None, "g000009-r01-a0", None)
    assert (group["groups"][0]["number"], group["before"], group["after"]) == (9, 4, 14)
    assert live.group({}, 24, "", None)["after"] is None
    assert live.group({}, 99, "", None)["groups"] == []
    assert live.details("g000003-r00-a0") is not None
    assert live.details("../x") is None
    for given in ({"sort": "number; DROP TABLE found"}, {"which": "1"}):
        with pytest.raises(ValueError):
            live.groups(given, 0, 9)


def test_words_may_be_anywhere_in_a_group(tmp_path: Path, opened: Open) -> None:
    step = {"code": "load('corn.csv')", "observations": "Über 40 rows", "error": "KeyError: '% 0x'"}
    call = {"name": "web_search", "arguments": {"query": "price of rye"}, "output": "None", "error": None}
    said = attempts(1, steps=[step], tool_calls=[call])
    appended(tmp_path / "rollouts.jsonl", *attempts(0), *said)
    live = opened(tmp_path)
    live.update()
    for search in ("corn.csv", "ÜBER", "'% 0X'", "rye WEB_search corn", "g000001-r01", "% load"):
        assert numbers(live, search=search) == [1], search
    assert numbers(live, search="corn nowhere") == []
    assert numbers(live, search="", outcome=str(said[0]["outcome"])) == [0, 1]
    assert numbers(live, search="", outcome="x' OR 1") == []


def test_a_value_that_cannot_be_shown_costs_nothing_else(tmp_path: Path, opened: Open) -> None:
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    appended(tmp_path / "rollouts.jsonl", *attempts(0))
    nested = json.dumps(attempts(1)[0] | {"reference": deep}).encode() + b"\n"
    many = [{"completion_tokens": 10**15 - 1}] * 18_500
    with (tmp_path / "rollouts.jsonl").open("ab") as end:
        end.write(nested)
    appended(tmp_path / "rollouts.jsonl", *attempts(2, completions=many))
    live = opened(tmp_path)
    assert live.update()["all_groups"] == 3
    assert live.groups({}, 0, 9)["groups"][1]["reference"] == "(list, too deep to show)"


def test_a_group_of_very_many_attempts_and_an_id_in_every_group_are_no_way_around_a_bound(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.report.reader.MOST_IN_GROUP", 20)
    line = attempts(0)[0]
    many = [line | {"index": index, "rollout_id": f"g000000-r{index}-a0"} for index in range(300)]
    same = [line | {"group": number, "rollout_id": "the same"} for number in range(1, 300)]
    appended(tmp_path / "rollouts.jsonl", *many, *same)
    live = opened(tmp_path)
    live.read(lambda share: None)  # on a busy machine that takes longer than an update may
    told = live.update()
    assert (told["totals"]["attempts"], told["forgotten"]) == (301, 280)
    shown = live.groups({}, 0, 1000)
    assert len(shown["rollouts"]) == 21
