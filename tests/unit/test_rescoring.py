"""Scoring a record again: what is read of a line, what changes in it, and how groups are made of it. Without any
grading process; the command itself is in tests/integration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.rescore import _report
from orchestrator.engine.group import GroupPolicy
from orchestrator.engine.health import HealthGate
from orchestrator.errors import ConfigError, ScorerError
from orchestrator.rescoring.changes import Changes
from orchestrator.rescoring.grouping import Grouping, MadeGroup
from orchestrator.rescoring.output import new_run
from orchestrator.rescoring.rescore import Copied, LeftOut, Overview, Rescored, Rescorer, Result, end_of
from orchestrator.run import lines as jsonl
from orchestrator.run.groups import GroupFormat, scored_data_group
from orchestrator.run.line import attempt_line, bad_task_line, read_attempt
from orchestrator.run.lines import TextLine
from orchestrator.types import (
    Attempt,
    BadTask,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Group,
    Member,
    Record,
    RolloutPlan,
    Score,
    Task,
)
from tests.fakes.synthetic_run import Rollouts, synthetic_groups

TASK = Task("sum", "What is it?", "42", level="2", source="tables")
MISSING = "its task is not there"


class ByAnswer:
    """Scores 0.25 for any answer; one that says `break` breaks it."""

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        if record.answer == "break":
            raise ScorerError("it is broken")
        return Score(0.25 if record.answer else 0.0, {"new": 1.0})


def line_of(result: Member | Attempt) -> bytes:
    return jsonl.dumps(attempt_line(result)) + b"\n"


def as_lines(*texts: bytes) -> list[TextLine]:
    return [TextLine(Path("rollouts.jsonl"), n, 0, text, len(text)) for n, text in enumerate(texts, 1)]


async def rescored(*texts: bytes, tasks: dict[str, Task | str] | None = None) -> list[Result]:
    lines = as_lines(*texts)
    found: list[Result] = []

    async def take(results: list[Result]) -> None:
        found.extend(results)

    known: dict[str, Task | str] = {"sum": TASK} if tasks is None else tasks
    rescorer = Rescorer(ByAnswer(), None, known, MISSING, Overview.of(lines), HealthGate())
    await rescorer.run(lines, take)
    return found


def members(count: int = 4) -> list[Member]:
    made = Rollouts()
    return [made.solved(TASK, 0, index, index % 2 == 0) for index in range(count)]


# ---------------------------------------------------------------- a line


def test_the_last_attempt_of_a_place_is_known_and_what_is_no_attempt_is_only_counted() -> None:
    made = Rollouts()
    task = replace(TASK, task_id='of "two"\n' + "words")
    first = made.broken(task, 0, 1, FailedName.SCORER_ERROR, "broke")
    plan = replace(first.plan, attempt=1, rollout_id="g000000-r01-a1")
    second = attempt_line(replace(first, plan=plan))
    no_attempts = (b"", b"{torn", b"[1]", b"\xff\0", b'{"task_id": 7, "group": 0, "index": 0, "attempt": 0}')
    overview = Overview.of(as_lines(line_of(first), json.dumps(second, indent=1).encode(), *no_attempts))
    assert (overview.lines, overview.tasks, overview.latest) == (7, {task.task_id}, {(0, 1): 1})


async def test_everything_hostile_comes_through_unchanged_but_for_its_score() -> None:
    *_, hostile = synthetic_groups(Rollouts(), plain=1)
    made = [line_of(member) for member in hostile.members_G]
    task = replace(hostile.task, task_id=read_attempt(made[0]).task_id)
    for text, result in zip(made, await rescored(*made, tasks={task.task_id: task}), strict=True):
        assert isinstance(result, Rescored)
        verdict = {"score": 0.25, "score_parts": {"new": 1.0}}
        assert result.text == jsonl.dumps({**json.loads(text), **verdict}) + b"\n"


@pytest.mark.parametrize(
    ("outcome", "ungraded", "answer", "end"),
    [
        (Ended(EndedName.MAX_STEPS, "12"), None, None, Ended(EndedName.MAX_STEPS, "12")),
        (Failed(FailedName.CANCELLED, "stop"), Ended(EndedName.TIMEOUT), None, Ended(EndedName.TIMEOUT)),
        (Failed(FailedName.CANCELLED, "stop"), None, None, None),
        (Failed(FailedName.SCORER_ERROR, "x"), None, "41", Ended(EndedName.FINISHED)),
        (Failed(FailedName.SCORER_ERROR, "x"), None, None, None),
        (Failed(FailedName.LLM_ERROR, "x"), None, None, None),
        (Failed(FailedName.RECORD_ERROR, "x"), None, "41", None),
    ],
)
def test_what_ended_can_be_scored_even_if_it_was_not(
    outcome: Ended | Failed, ungraded: Ended | None, answer: str | None, end: Ended | None
) -> None:
    attempt = members(1)[0].attempt
    attempt = replace(attempt, outcome=outcome, ungraded=ungraded, record=replace(attempt.record, answer=answer))
    assert end_of(read_attempt(line_of(attempt))) == end


# ---------------------------------------------------------------- lines in, lines out


async def test_lines_come_out_in_their_order_with_other_scores_and_nothing_else_new() -> None:
    made = members()
    results = await rescored(*map(line_of, made))
    for before, result in zip(made, results, strict=True):
        assert isinstance(result, Rescored)
        expected = json.loads(line_of(before)) | {"score": 0.25, "score_parts": {"new": 1.0}}
        assert json.loads(result.text) == expected
        assert (result.before.score, result.after.score) == (before.score, Score(0.25, {"new": 1.0}))


async def test_failures_stay_as_they_were_and_bad_tasks_too() -> None:
    lost = line_of(Rollouts().broken(TASK, 0, 0, FailedName.SANDBOX_LOST, "gone"))
    bad = jsonl.dumps(bad_task_line(BadTask("row 3", "torn"), 5)) + b"\n"
    first, second = await rescored(lost, bad)
    assert isinstance(first, Rescored)
    assert first.text == lost
    assert second == Copied("g000005", "rollouts.jsonl:2", bad)


async def test_a_rollout_that_broke_the_scorer_gets_its_score_unless_another_took_its_place() -> None:
    finished = members(1)[0].attempt
    broke = replace(finished, outcome=Failed(FailedName.SCORER_ERROR, "its endpoint was away"))
    plan = replace(finished.plan, attempt=1, rollout_id="g000000-r00-a1")
    (alone,) = await rescored(line_of(broke))
    assert isinstance(alone, Rescored)
    assert alone.after.outcome == Ended(EndedName.FINISHED)
    assert json.loads(alone.text)["score"] == 0.25
    before, after = await rescored(
        line_of(broke), line_of(replace(members(1)[0], attempt=replace(finished, plan=plan)))
    )
    assert isinstance(before, Rescored)
    assert isinstance(after, Rescored)
    assert (before.after.score, after.after.score) == (None, Score(0.25, {"new": 1.0}))


async def test_without_its_task_or_with_a_broken_scorer_there_is_no_score() -> None:
    one = members(1)[0]
    breaks = replace(one, attempt=replace(one.attempt, record=replace(one.attempt.record, answer="break")))
    for text, tasks, reason in (
        (line_of(one), {}, MISSING),
        (line_of(one), {"sum": "its task cannot be read: torn"}, "its task cannot be read: torn"),
        (line_of(breaks), None, "it is broken"),
    ):
        (result,) = await rescored(text, tasks=tasks)
        assert isinstance(result, Rescored)
        assert result.after.outcome == Failed(FailedName.SCORER_ERROR, reason)
        written = read_attempt(result.text)
        assert (written.score, written.token_source, written.segment) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"score": "high"}, "score: Input should be a valid number"),
        ({"completions": {"a": 1}}, "completions"),
        ({"index": -1}, "index"),
        ({"plan": None}, "plan"),
        ({"group": 1 << 60}, "group"),
    ],
)
async def test_a_line_with_a_wrong_type_is_named_and_costs_no_other(change: dict[str, Any], reason: str) -> None:
    first, last = members(2)
    wrong = jsonl.dumps({**attempt_line(first), "rollout_id": "g000000-r07-a0", **change}) + b"\n"
    results = await rescored(line_of(first), wrong, line_of(last))
    assert isinstance(results[1], LeftOut)
    assert results[1].place == "rollouts.jsonl:2"
    assert reason in results[1].reason
    assert isinstance(results[0], Rescored)
    assert isinstance(results[2], Rescored)


async def test_torn_empty_and_doubled_lines_are_named() -> None:
    whole = line_of(members(1)[0])
    results = await rescored(whole, whole[: len(whole) // 2], b"\n", whole, b"\xff\xfe{}", whole.rstrip(b"\n"))
    kinds = [type(result) for result in results]
    assert kinds == [Rescored, LeftOut, LeftOut, LeftOut, LeftOut, LeftOut]
    assert [result.reason for result in results if isinstance(result, LeftOut)][2] == (
        "g000000-r00-a0 is there a second time"
    )


async def test_a_line_without_its_newline_gets_one() -> None:
    whole = line_of(members(1)[0])
    assert [result.text for result in await rescored(whole.rstrip(b"\n")) if isinstance(result, Rescored)] == [
        result.text for result in await rescored(whole) if isinstance(result, Rescored)
    ]


# ---------------------------------------------------------------- groups


async def grouped(
    folder: Path, *results: Member | Attempt, policy: str = "backfill", zero_variance: Any = "keep", size: int = 4
) -> list[MadeGroup]:
    grouping, record = Grouping(GroupPolicy.parse(policy, zero_variance), size), folder / "rollouts.jsonl"
    offset = 0
    with record.open("wb") as file:
        for result in await rescored(*map(line_of, results)):
            assert isinstance(result, Rescored)
            grouping.add(result.after, offset)
            offset += file.write(result.text)
    return list(grouping.groups(record, {"sum": TASK}, GroupFormat()))


async def test_a_group_s_line_is_what_the_run_would_have_written(tmp_path: Path) -> None:
    made = members()
    scores = [replace(member, score=Score(0.25, {"new": 1.0})) for member in made]
    (group,) = await grouped(tmp_path, *reversed(made))
    whole = Group(0, TASK, tuple(scores), tuple(member.attempt for member in scores))
    assert group == MadeGroup(0, TASK.task_id, (jsonl.dumps(scored_data_group(whole)) + b"\n",))


async def test_a_group_that_lacks_a_rollout_is_left_out_or_kept_as_the_policy_says(tmp_path: Path) -> None:
    lost = Rollouts().broken(TASK, 0, 3, FailedName.LLM_ERROR, "503")
    results = (*members(3), lost)
    for policy in ("backfill", "drop", "partial:4"):
        (group,) = await grouped(tmp_path, *results, policy=policy)
        assert (group.lines, group.dropped) == ((), "3 of 4 rollouts usable, mostly llm_error: 503")
    (group,) = await grouped(tmp_path, *results, policy="partial:3")
    assert (len(group.lines), group.dropped) == (1, None)
    (group,) = await grouped(tmp_path, *members(), zero_variance="drop")
    assert (group.lines, group.dropped) == ((), "all 4 rollouts have the same score, 0.25")


async def test_of_a_group_drawn_twice_the_second_draw_counts_unless_too_much_of_it_broke(tmp_path: Path) -> None:
    first = members()
    second = []
    for member in members():
        plan = member.attempt.plan
        plan = replace(plan, attempt=1, rollout_id=f"g000000-r{plan.index:02d}-a1")
        second.append(replace(member, attempt=replace(member.attempt, plan=plan)))

    def ids(group: MadeGroup) -> set[str]:
        return {facts["rollout_id"][-2:] for facts in json.loads(group.lines[0])["overrides"]}

    (group,) = await grouped(tmp_path, *first, *second, zero_variance="resample")
    assert ids(group) == {"a1"}
    (group,) = await grouped(tmp_path, *first, *second[:3], zero_variance="resample")
    assert ids(group) == {"a0"}


async def test_a_group_has_the_size_that_its_record_says(tmp_path: Path) -> None:
    def sized(size: int, *results: Member) -> list[Member]:
        plans = [replace(member.attempt.plan, group_size=size) for member in results]
        pairs = zip(results, plans, strict=True)
        return [replace(member, attempt=replace(member.attempt, plan=plan)) for member, plan in pairs]

    (group,) = await grouped(tmp_path, *sized(2, *members(2)))
    assert group.dropped is None
    (group,) = await grouped(tmp_path, *sized(5, *members(4)))
    assert group.dropped == "4 of 5 rollouts usable"


async def test_groups_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = Rollouts()
    results = [made.solved(TASK, number, index, correct=True) for index in range(2) for number in (7, 2, 5)]
    assert [group.number for group in await grouped(tmp_path, *results, size=2)] == [2, 5, 7]


# ---------------------------------------------------------------- what is told, and where it goes


def test_changes_are_counted_by_outcome_and_source() -> None:
    told = read_attempt(line_of(members(1)[0]))
    changes = Changes()
    for then, now in ((1.0, 0.5), (0.0, 0.5), (0.5, 0.5)):
        changes.add(replace(told, score=Score(then)), replace(told, score=Score(now)))
    failed = replace(told, outcome=Failed(FailedName.SCORER_ERROR, "gone"), score=None)
    changes.add(failed, told)
    changes.add(told, failed)
    changes.add(failed, failed)
    assert (changes.all.rollouts, changes.all.changed, changes.all.higher, changes.all.lower) == (3, 2, 1, 1)
    assert (changes.all.solved_then, changes.all.solved_now) == (1, 0)
    assert changes.by_outcome == {"finished": changes.all}
    assert changes.by_source == {"tables": changes.all}
    assert changes.gained == {"scorer_error": 1}
    assert (changes.lost, changes.reasons) == ({"scorer_error": 1}, {"scorer_error": "gone"})
    assert changes.unscored == {"scorer_error": 1}


def test_a_new_run_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_run(tmp_path / "new"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with new_run(tmp_path / "new") as run:
        assert not (tmp_path / "new").exists()
        assert (run.add(b"one\n"), run.add(b"two\n")) == (0, 4)
        run.describe({"a": 1})
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"run.json", "rollouts.jsonl"}


def test_its_report_has_that_name_too(tmp_path: Path) -> None:
    with new_run(tmp_path / "new") as run:
        run.describe({})
        run.write_groups([])
        assert _report(run, tmp_path / "new") == str(tmp_path / "new" / "groups.html")
    page = (tmp_path / "new" / "groups.html").read_text()
    assert f'"name":"new","directory":"{tmp_path}/new"' in page


def test_who_comes_second_is_told_and_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.run_dir: .*new already exists"), new_run(tmp_path / "new"):
        with new_run(tmp_path / "new") as first:
            first.describe({"first": True})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "run.json").exists()
