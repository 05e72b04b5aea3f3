"""The figures of a run are of all of it, whatever is kept of its rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.comparing.comparison import ComparedRun
from orchestrator.report import write_report
from orchestrator.report.reader import RunReader, read_run
from orchestrator.report.totals import BINS, MOST_NAMES, OTHERS, UNGRADABLE, Totals
from orchestrator.run.files import read_description
from orchestrator.run.line import attempt_line
from orchestrator.run.lines import dumps
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from tests.fakes.plans import a_member
from tests.fakes.synthetic_run import write_synthetic_run
from tests.unit.test_report import Elements


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("orchestrator.report.reader.MOST_ATTEMPTS", 12)
    return 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    write_synthetic_run(run)
    return run


def a_line(group: int, index: int, attempt: int = 0, **changes: object) -> dict[str, object]:
    name = f"g{group:06d}-r{index:02d}-a{attempt}"
    return attempt_line(a_member()) | {
        "group": group,
        "index": index,
        "attempt": attempt,
        "rollout_id": name,
        **changes,
    }


def append(file: Path, *values: object) -> None:
    with file.open("ab") as end:
        end.writelines(dumps(value) + b"\n" for value in values)


def test_they_are_those_of_its_rows(made: Path) -> None:
    run = read_run(made, made / "groups.jsonl")
    rows, totals = list(run.rollouts.values()), run.totals
    scored = [row for row in rows if row["score"] is not None]
    assert (totals.attempts, totals.scored) == (len(rows), len(scored))
    assert totals.solved == sum(row["solved"] for row in scored)
    assert totals.score == pytest.approx(sum(row["score"] for row in scored))
    assert totals.tokens == sum(row["tokens"] for row in rows)
    assert totals.scored_tokens == sum(row["tokens"] for row in scored)
    assert totals.repeated == sum(row["retries"] for row in rows)
    assert totals.outcomes == Counter(row["outcome"] for row in rows)
    assert totals.began == min(row["started_at"] for row in rows if row["started_at"] is not None)
    assert [sum(pair) for pair in totals.scores] == [
        sum(min(BINS - 1, int(row["score"] * BINS)) == place for row in scored) for place in range(BINS)
    ]
    groups = list(run.groups.values())
    assert totals.groups == len(groups)
    assert totals.written == sum(group["written"] for group in groups) > 0
    assert totals.mixed == sum(group["mixed"] and group["written"] for group in groups) > 0
    assert totals.divided == sum(group["divided"] and group["written"] for group in groups) > 0
    again = Counter[str]()
    for group in groups:
        last: dict[int, str] = {}
        for row in sorted((r for r in rows if r["group"] == group["number"]), key=lambda r: r["attempt"]):
            if (before := last.get(row["index"])) is not None:
                again[before] += 1
            last[row["index"]] = row["outcome"]
    assert {name: told.times for name, told in totals.drawn_again.items()} == again != {}


def test_they_stay_the_same_with_fewer_rows(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = read_run(made, made / "groups.jsonl")
    monkeypatch.setattr("orchestrator.report.reader.MOST_ATTEMPTS", 12)
    few = read_run(made, made / "groups.jsonl")
    assert len(few.rollouts) <= 12 < len(of_all.rollouts)
    assert few.totals == of_all.totals
    assert len(few.rollouts) + few.forgotten == len(of_all.rollouts)
    assert few.rollouts.keys() == set(list(of_all.rollouts)[-len(few.rollouts) :])
    for name, row in few.rollouts.items():
        assert row == of_all.rollouts[name]
        assert few.written.get(name) == of_all.written.get(name)


def test_the_page_of_a_long_run_has_them_and_the_last_rows(made: Path, tmp_path: Path, few_rows: int) -> None:
    of_all = read_run(made, made / "groups.jsonl").totals.shown()
    write_report(made, made / "groups.jsonl", tmp_path / "page.html")
    block = Elements((tmp_path / "page.html").read_text()).block("run")
    assert block["totals"]["attempts"] == of_all["attempts"] == len(block["rollouts"]) + block["forgotten"]
    assert 0 < len(block["rollouts"]) <= few_rows
    assert {row["group"] for row in block["rollouts"]} == {group["number"] for group in block["groups"]}


@pytest.mark.long
def test_nothing_that_is_kept_grows_with_the_run(tmp_path: Path, few_rows: int) -> None:
    reader = RunReader(tmp_path)
    for start in range(0, 600, 150):
        for number in range(start, start + 150):
            lines = [a_line(number, index) for index in range(2)]
            append(tmp_path / "rollouts.jsonl", *lines)
            append(tmp_path / "groups.jsonl", {"overrides": [{"rollout_id": f"lost-{number}"}, lines[0]]})
            append(tmp_path / "dropped.jsonl", {"group": -number, "reason": f"reason {number}"})
        reader.read(tmp_path / "groups.jsonl")
    run = reader.run
    assert (run.totals.attempts, run.totals.groups, run.totals.written) == (1200, 600, 600)
    kept = (run.rollouts, run.groups, run.places, run.written, reader._staleness, reader._dropped, reader._members)
    assert all(len(each) <= 4 * few_rows for each in kept)
    assert [group["written"] for group in run.groups.values()] == [True] * len(run.groups)
    assert len(run.totals.dropped) == MOST_NAMES + 1
    assert run.totals.dropped[OTHERS] == 600 - MOST_NAMES


def test_one_group_of_very_many_attempts_is_no_way_around_it(tmp_path: Path, few_rows: int) -> None:
    append(tmp_path / "rollouts.jsonl", *(a_line(0, index) for index in range(200)))
    run = read_run(tmp_path, None)
    assert len(run.rollouts) <= few_rows
    assert run.totals.attempts == 200


def test_a_group_of_more_attempts_than_rows_is_one_group_and_shown_as_far_as_it_goes(
    tmp_path: Path, few_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "rollouts.jsonl", *(a_line(0, index) for index in range(few_rows + 1)))
    with (tmp_path / "rollouts.jsonl").open("ab") as end:
        end.write(b"torn")
    assert main(["view", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    assert "groups         1, " in capsys.readouterr().out
    assert read_run(tmp_path, None).totals.groups == 1


def test_a_group_that_is_tried_again_after_it_was_forgotten_is_counted_once(tmp_path: Path, few_rows: int) -> None:
    append(tmp_path / "rollouts.jsonl", *(a_line(number, 0) for number in range(2 * few_rows)), a_line(0, 0, 1))
    assert read_run(tmp_path, None).totals.groups == 2 * few_rows


def test_a_dropped_group_that_a_resume_wrote_is_no_longer_one_that_was_not_written(tmp_path: Path) -> None:
    append(tmp_path / "rollouts.jsonl", a_line(0, 0), a_line(1, 0))
    drops = [{"group": group, "reason": "of equal scores"} for group in (0, 1, 1)]
    append(tmp_path / "dropped.jsonl", *drops)
    reader = RunReader(tmp_path)
    reader.read(tmp_path / "groups.jsonl")
    assert reader.run.totals.shown()["dropped"] == [("of equal scores", 2)]
    append(tmp_path / "groups.jsonl", {"overrides": [{"rollout_id": "g000000-r00-a0"}]})
    reader.read(tmp_path / "groups.jsonl")
    assert reader.run.totals.shown()["dropped"] == [("of equal scores", 1)]
    assert read_run(tmp_path, tmp_path / "groups.jsonl").totals == reader.run.totals


def test_what_a_forgotten_rollout_took_is_not_counted_again_with_its_score(tmp_path: Path, few_rows: int) -> None:
    took = {"completions": [{"completion_tokens": 5, "prompt_tokens": 50, "retries": 2}]}
    ended = {"outcome": "finished", "reason": ""}
    stopped = a_line(0, 0, **took, score=None, outcome="cancelled", ungraded=ended)
    between = [a_line(number, 0, completions=[]) for number in range(1, 2 * few_rows)]
    append(tmp_path / "rollouts.jsonl", stopped, *between, a_line(0, 0, 1, **took))
    totals = read_run(tmp_path, None).totals
    assert (totals.tokens, totals.repeated, totals.attempts) == (5, 2, 2 * few_rows + 1)


def test_an_id_in_every_group_fills_no_memory(tmp_path: Path, few_rows: int) -> None:
    lines = (a_line(number, number, rollout_id="the same") for number in range(500))
    append(tmp_path / "rollouts.jsonl", *lines)
    append(tmp_path / "dropped.jsonl", *({"group": number, "reason": "x"} for number in range(500)))
    reader = RunReader(tmp_path)
    reader.read(None)
    assert reader.run.totals.attempts == 1
    assert max(len(reader.run.groups), len(reader._members), len(reader._dropped)) <= 4 * few_rows
    assert sum(map(len, reader._members.values())) <= few_rows


def test_the_tokens_shown_are_those_of_the_main_line(tmp_path: Path) -> None:
    append(tmp_path / "rollouts.jsonl", a_line(0, 0))
    main_line = {"rollout_id": "g000000-r00-a0", "segment": 0, "main_segment": 0}
    append(tmp_path / "groups.jsonl", {"overrides": [main_line]}, {"overrides": [main_line | {"segment": 1}]})
    assert read_run(tmp_path, tmp_path / "groups.jsonl").written == {"g000000-r00-a0": (0, 0)}


def test_numbers_of_any_size_and_parts_of_any_number_are_written(tmp_path: Path) -> None:
    many = [{"completion_tokens": 10**15 - 1}] * 18_500
    parts = {str(number): 1.0 for number in range(5000)}
    append(tmp_path / "rollouts.jsonl", a_line(0, 0, completions=many), a_line(0, 1, score_parts=parts))
    write_report(tmp_path, tmp_path / "groups.jsonl", tmp_path / "page.html")
    rows = Elements((tmp_path / "page.html").read_text()).block("run")["rollouts"]
    assert rows[0]["tokens"] == 18_500 * (10**15 - 1)
    assert len(rows[1]["parts"]) == 100


def test_an_answer_that_is_read_and_cannot_be_written_is_a_line_that_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    groups = [{"scores": [1.0], "overrides": [{"rollout_id": "a", "outcome": "finished", "answer": deep}]}]
    groups += [{"scores": [1.0], "overrides": [{"rollout_id": "b", "outcome": "finished", "answer": "x"}]}]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    assert main(["view", str(tmp_path / "g.jsonl")]) == 0
    assert "finished 1" in capsys.readouterr().out


def test_of_an_attempt_that_comes_again_the_last_line_counts(tmp_path: Path) -> None:
    ungraded = a_line(0, 0, score=None, outcome="grading_error", reason="away", ungraded=True)
    append(tmp_path / "rollouts.jsonl", ungraded, a_line(0, 0), a_line(0, 1), a_line(0, 1, 1))
    totals = read_run(tmp_path, None).totals
    assert (totals.attempts, totals.scored) == (3, 3)
    assert totals.shown()["outcomes"] == [("finished", 3, 3)]
    assert totals.shown()["not_scored"] == []
    assert [told.times for told in totals.drawn_again.values()] == [1], "the same attempt is no further draw"


def test_what_a_rollout_took_counts_once_and_before_it_is_graded(tmp_path: Path) -> None:
    completions = [{"completion_tokens": 5, "prompt_tokens": 50, "retries": 2}]
    took = {"completions": completions, "duration_s": 3.0}
    ended = {"outcome": "finished", "reason": ""}
    first = a_line(0, 0, **took, score=None, outcome="cancelled", reason="stopped", ungraded=ended)
    (tmp_path / "run.json").write_text('{"prices": [{"prompt": 1e6, "completion": 1e6, "weight": 1.0}]}')
    prices = Prices.recorded(read_description(tmp_path))
    assert prices is not None
    second = first | {"rollout_id": "g000000-r00-a1", "attempt": 1}
    for lines in ([first], [first, second], [first, second, a_line(0, 0, 2, **took)]):
        (tmp_path / "rollouts.jsonl").write_bytes(b"")
        append(tmp_path / "rollouts.jsonl", *lines)
        totals, compared, tally = (
            read_run(tmp_path, None).totals,
            ComparedRun.read(tmp_path),
            Tally.read(tmp_path / "rollouts.jsonl", prices),
        )
        assert (totals.tokens, totals.repeated) == (5, 2)
        assert (compared.prompt_tokens, compared.duration_s, compared.cost) == (50, 3.0, 55.0)
        assert (tally.tokens, tally.rollout_s, tally.cost) == (5, 3.0, 55.0)
        assert tally.ungraded == (set() if len(lines) == 3 else {(0, 0)})
    assert (totals.attempts, totals.scored, totals.drawn_again) == (3, 1, {})


def test_side_lines_are_no_groups_of_their_own() -> None:
    totals = Totals()
    totals.count_written({"scores": [1.0, 0.0], "overrides": [{"segment": 0, "main_segment": 0}] * 2})
    totals.count_written({"scores": [1.0, 0.0], "overrides": [{"segment": 1, "main_segment": 0}] * 2})
    assert (totals.written, totals.mixed, totals.divided) == (1, 1, 1)


def test_members_without_a_readable_score_make_no_group_mixed() -> None:
    totals = Totals()
    for scores in ([1.0, None], [1.0], None, "x", [[], 1.0]):
        totals.count_written({"scores": scores, "overrides": [{}, {}]})
    assert (totals.written, totals.mixed, totals.divided) == (5, 0, 0)


def test_what_could_not_be_graded_is_told_apart(tmp_path: Path) -> None:
    failed = {"score": 0.0, "score_parts": {"correctness": 0.0}, "score_evidence": {"failure": "the grader broke"}}
    append(tmp_path / "rollouts.jsonl", a_line(0, 0, **failed), a_line(0, 1))
    totals = read_run(tmp_path, None).totals
    assert totals.shown()["not_scored"] == [(UNGRADABLE, 1, "the grader broke")]
    assert (totals.scored, totals.solved) == (2, 1)


def test_runs_are_compared_by_all_of_their_attempts(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = ComparedRun.read(made)
    monkeypatch.setattr("orchestrator.report.reader.MOST_ATTEMPTS", 12)
    assert ComparedRun.read(made) == of_all
