"""Rows say what the groups file says, bit by bit, whether they come from a group or from the record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.completion.trajectory import main_line
from orchestrator.run.groups import MASKED, GroupFormat
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.rows import Row, bad_task_row, group_rows, recorded_rows, result_rows
from orchestrator.types import (
    Attempt,
    BadTask,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Group,
    Member,
    Message,
    Record,
    Score,
    Turn,
)
from tests.fakes.plans import TALK, a_plan, a_record, a_turn, an_attempt

ALL = GroupFormat(all_segments=True)
SAID = (Message("assistant", "x"), Message("user", "Observation: 1"))
IDS = st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(tuple)


@st.composite
def turns(draw: st.DrawFn, exact: bool) -> tuple[Turn, ...]:
    """Up to five turns on up to three lines, by up to two policy versions."""
    made: list[Turn] = []
    for sequence in range(1, draw(st.integers(1, 5)) + 1):
        ids, segment = draw(IDS), draw(st.integers(0, 2))
        logprobs = draw(st.lists(st.floats(-9.0, 0.0), min_size=len(ids), max_size=len(ids)))
        version = draw(st.sampled_from(["v1", "v2"]))
        reason = draw(st.sampled_from(["stop", "length"]))
        sampled = Completion("x", "x", reason, ids, tuple(logprobs) if exact else None, 1, len(ids), version)
        talk = TALK + SAID * sum(turn.segment == segment for turn in made)
        kind = draw(st.sampled_from([CompletionKind.ACTION, CompletionKind.PLAN]))
        turn = replace(a_turn(sequence=sequence, completion=sampled), messages=talk, segment=segment)
        made.append(replace(turn, prompt_ids=draw(IDS), kind=kind))
    return tuple(made)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    exact = draw(st.booleans())
    members = []
    for index in range(draw(st.integers(1, 3))):
        plan, record = a_plan(index), replace(a_record(0), turns=draw(turns(exact)))
        outcome = Ended(draw(st.sampled_from([EndedName.FINISHED, EndedName.TIMEOUT])))
        score = Score(draw(st.floats(0.0, 1.0)))
        members.append(Member(Attempt(plan, record, outcome), main_line(plan, record, None), score))
    return Group(0, a_plan().task, tuple(members), tuple(m.attempt for m in members))


def in_file(row: Row) -> tuple[list[int], list[int], list[float | None] | None]:
    """The row's tokens, masks and log-probs in the shapes of the groups file; None where masked."""
    before = len(row.prompt_ids)
    masks = [t if m else MASKED for t, m in zip(row.completion_ids, row.env_mask, strict=True)]
    logprobs = None if row.logprobs is None else [None] * before + list(row.logprobs)
    return [*row.prompt_ids, *row.completion_ids], [MASKED] * before + masks, logprobs


@given(groups(), st.booleans(), st.booleans())
def test_rows_are_the_groups_file_bit_by_bit(group: Group, mixed: bool, all_ends: bool) -> None:
    untrained = frozenset() if all_ends else frozenset({EndedName.TIMEOUT})
    form = replace(ALL, mixed_versions=mixed, untrained=untrained)
    rows = {(row.rollout_id, row.segment): row for row in group_rows(group, form)}
    assert [r.rollout_id for r in rows.values() if r.main] == [m.attempt.plan.rollout_id for m in group.members_G]
    lines = form.groups(group)
    for line in lines:
        for i, facts in enumerate(line["overrides"]):
            row = rows[facts["rollout_id"], facts["segment"]]
            tokens, masks, logprobs = in_file(row)
            assert tokens == line["tokens"][i]
            assert masks == line["masks"][i]
            written = line["inference_logprobs"]
            assert (logprobs is None) == (written is None)
            if written is not None:
                assert logprobs == [p if m != MASKED else None for p, m in zip(written[i], masks, strict=True)]
            assert row.score == line["scores"][i]
            for name in ("task_id", "outcome", "policy_version", "token_source"):
                assert getattr(row, name) == facts[name]
            assert [{"role": m.role, "content": m.content} for m in row.messages] == line["messages"][i]


@given(groups())
def test_rows_of_the_record_are_those_of_the_group(group: Group) -> None:
    read = [read_attempt(dumps(attempt_line(member))) for member in group.members_G]
    assert [row for told in read for row in recorded_rows(told, ALL)] == group_rows(group, ALL)


@given(groups())
def test_every_rollout_has_one_main_row_and_rows_that_are_not_trained_say_so(group: Group) -> None:
    for member in group.members_G:
        main, *sides = result_rows(member, GroupFormat())
        assert main.main
        assert (main.score, main.weight) == (member.score.value, 1.0)
        assert [(side.main, side.score, side.weight) for side in sides] == [(False, None, 0.0)] * len(sides)
        assert not any(any(side.env_mask) for side in sides)
        assert len(sides) + 1 == len({turn.segment for turn in member.attempt.record.turns})
        for row in (main, *sides):
            assert row.env_mask[0] == row.main  # the completion begins with a sampled token
            last = [t for t in member.attempt.record.turns if t.segment == row.segment][-1]
            assert row.finish_reason == last.completion.finish_reason


def test_a_rollout_without_a_score_has_a_row_without_a_score() -> None:
    sampled = Completion("x", "x", "stop", (7, 8), (-0.5, -0.25), 1, 2, "v1")
    turn = replace(a_turn(completion=sampled), prompt_ids=(1, 2, 3))
    lost = Attempt(a_plan(), a_record(0), Failed(FailedName.SANDBOX_LOST, "gone"))
    lost = replace(lost, record=replace(lost.record, turns=(turn,)))
    (row,) = result_rows(lost, GroupFormat())
    assert (row.outcome, row.reason, row.score, row.main) == ("sandbox_lost", "gone", None, True)
    assert (row.prompt_ids, row.completion_ids) == ((1, 2, 3), (7, 8))
    assert (row.env_mask, row.logprobs) == ((0, 0), (None, None))
    assert recorded_rows(read_attempt(dumps(attempt_line(lost))), GroupFormat()) == [row]


@pytest.mark.parametrize("record", [Record(0.0), a_record()])
def test_what_has_no_line_has_a_row_without_ids(record: Record) -> None:
    broken = Attempt(a_plan(), record, Failed(FailedName.RECORD_ERROR, "does not add up"))
    (row,) = result_rows(broken, GroupFormat())
    assert (row.prompt_ids, row.completion_ids, row.token_source) == ((), (), "none")
    assert (row.outcome, row.reason, row.finish_reason) == ("record_error", "does not add up", None)


def test_a_bad_task_has_a_row() -> None:
    row = bad_task_row(BadTask("q7", "no question"), 7)
    assert (row.task_id, row.group, row.outcome, row.reason) == ("q7", 7, "bad_task", "no question")
    assert row.score is None


def test_rows_of_a_dropped_group_say_so_and_nothing_of_them_is_trained() -> None:
    sampled = Completion("x", "x", "stop", (7,), (-0.5,), 1, 1)
    record = a_record(0)
    record = replace(record, turns=(replace(a_turn(completion=sampled), prompt_ids=(1,)),))
    attempt = Attempt(a_plan(0), record, Ended(EndedName.FINISHED))
    member = Member(attempt, main_line(attempt.plan, record, None), Score(1.0))
    first, second = (an_attempt(Failed(FailedName.LLM_ERROR, "away"), 1, n) for n in range(2))
    group = Group(0, attempt.plan.task, (member,), (attempt, first, second), dropped="1 of 2 usable")
    rows = group_rows(group, GroupFormat())
    assert [(r.index, r.outcome, r.score, r.dropped) for r in rows] == [
        (0, "finished", 1.0, "1 of 2 usable"),
        (1, "llm_error", None, "1 of 2 usable"),
    ]
    assert rows[0].env_mask == (0,)
    assert rows[1].rollout_id == second.plan.rollout_id


def test_a_side_line_that_does_not_add_up_says_why() -> None:
    good = Completion("x", "x", "stop", (7,), (-0.5,), 1, 1)
    bad = replace(good, logprobs_T=(0.5,))
    turn = replace(a_turn(completion=good), prompt_ids=(1,))
    record = replace(a_record(0), turns=(turn, replace(turn, sequence=2, segment=1, completion=bad)))
    plan = a_plan()
    member = Member(Attempt(plan, record, Ended(EndedName.FINISHED)), main_line(plan, record, None), Score(1.0))
    main, side = result_rows(member, GroupFormat())
    assert main.completion_ids == (7,)
    assert (side.main, side.completion_ids, side.reason) == (False, (), "turn 2: 0.5 is no log-probability")


def test_a_line_whose_conversation_gets_shorter_does_not_add_up() -> None:
    sampled = Completion("x", "x", "stop", (7,), (-0.5,), 1, 1)
    turn = replace(a_turn(completion=sampled), prompt_ids=(1,))
    record = replace(a_record(0), turns=(turn, replace(turn, sequence=2)))
    (row,) = result_rows(Attempt(a_plan(), record, Failed(FailedName.CANCELLED, "stopped")), GroupFormat())
    assert row.reason == "turn 1: the line's last conversation does not contain it"
