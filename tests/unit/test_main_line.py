"""Which line of a program's rollout is the main one, and what each of its lines counts for."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.completion.trajectory import main_line, main_segment
from orchestrator.errors import ConfigError
from orchestrator.run.excerpts import read_written_group
from orchestrator.run.groups import MASKED, GroupFormat, settle
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.rows import Row, group_rows, recorded_rows
from orchestrator.run.tally import Tally
from orchestrator.run.verify import Findings, check_group
from orchestrator.settings.sources import load_config
from orchestrator.terminal.closing import closing_table
from orchestrator.types import (
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Group,
    MainLine,
    Member,
    Message,
    Score,
    Turn,
)
from tests.fakes.plans import TALK, a_plan, a_record, a_turn

QUESTION = TALK[1].content
OTHER = (TALK[0], Message("user", "A title, please."))


def asked(segment: int, tokens: int, *, abandoned: bool = False, talk: tuple[Message, ...] = TALK) -> Turn:
    """A completion of so many tokens on a line of its own."""
    sampled = Completion("x", "x", "stop", tuple(range(1, tokens + 1)), (-0.5,) * tokens, 1, tokens, "v1")
    turn = replace(a_turn(sequence=segment + 1, completion=sampled), messages=talk, segment=segment)
    return replace(turn, prompt_ids=(100 + segment,), abandoned=abandoned)


def a_member(*turns: Turn, index: int = 0, rule: MainLine = "longest", kind: Any = "program") -> Member:
    plan = a_plan(index)
    plan = replace(plan, agent=replace(plan.agent, kind=kind, main_line=rule))
    record = replace(a_record(0), turns=turns)
    attempt = Attempt(plan, record, Ended(EndedName.FINISHED))
    return Member(attempt, main_line(plan, record, None), Score(0.25))


def group(*members: Member) -> Group:
    return Group(0, a_plan().task, members, tuple(member.attempt for member in members))


def trained(row: Row) -> list[int]:
    return [token for token, learns in zip(row.completion_ids, row.env_mask, strict=True) if learns]


@pytest.mark.parametrize(("rule", "segment"), [("longest", 1), ("first", 0), ("last", 3), ("question", 2)])
def test_the_rule_names_the_main_line(rule: MainLine, segment: int) -> None:
    turns = (asked(0, 2, talk=OTHER), asked(1, 9, talk=OTHER), asked(2, 3), asked(3, 4))
    assert main_segment(turns, QUESTION, rule) == segment


def test_a_model_that_repeats_the_question_does_not_choose_its_line() -> None:
    repeated = (*OTHER, Message("assistant", f"You asked: {QUESTION}"), Message("user", "Go on."))
    assert (
        main_segment((asked(0, 2, talk=OTHER), asked(1, 2, talk=repeated), asked(2, 3)), QUESTION, "question") == 2
    )


def test_of_lines_of_the_same_length_the_first_is_the_main_one() -> None:
    assert main_segment((asked(0, 2), asked(1, 5), asked(2, 5)), rule="longest") == 1


@pytest.mark.parametrize("rule", ["longest", "first", "last", "question"])
def test_an_answer_that_nobody_got_does_not_decide(rule: MainLine) -> None:
    turns = (asked(0, 50, abandoned=True), asked(1, 3), asked(2, 40, abandoned=True))
    assert main_segment(turns, QUESTION, rule) == 1
    assert main_segment(turns[:1], QUESTION, rule) == 0  # there is no other


def test_an_answer_that_nobody_got_is_in_no_line_and_counts_as_untrained() -> None:
    """The line goes on before it; one that has nothing else is no line."""
    first, cut, again = (
        asked(0, 2),
        replace(asked(0, 50, abandoned=True), sequence=2),
        replace(asked(0, 1), sequence=3),
    )
    talk = (*TALK, Message("assistant", "x"), Message("user", "Go on."))
    cut, again = (replace(turn, messages=talk, prompt_ids=(200,)) for turn in (cut, again))
    member = a_member(first, cut, again, replace(asked(1, 7, abandoned=True), sequence=4))
    assert member.trajectory.tokens_T == (100, 1, 2, 200, 1)
    line = attempt_line(member)
    assert [turn.get("abandoned") for turn in line["completions"]] == [None, True, None, True]
    told = read_attempt(dumps(line))
    assert told.record == member.attempt.record
    (row,) = recorded_rows(told, GroupFormat())
    assert (row.weight, trained(row), sum(span.tokens for span in row.policy_spans)) == (1.0, [1, 2, 1], 3)
    (written,) = json.loads(dumps(GroupFormat(all_segments=True).groups(group(member))))
    (facts,) = written["overrides"]
    assert (facts["segments"], facts["other_segments"]) == (1, [])
    assert (facts["untrained_completions"], facts["abandoned_completions"]) == (2, 2)
    assert facts["untrained_share"] == told.untrained_share == 57 / 60
    findings = Findings()
    check_group(written, "line 1", findings, {told.rollout_id: dumps(line)})
    assert findings.wrong == {}
    tally = Tally()
    tally.group(group(member))
    assert (tally.trained_tokens, tally.untrained_tokens) == (3, 57)


def test_where_nobody_got_an_answer_what_was_sampled_is_scored() -> None:
    member = a_member(asked(0, 3, abandoned=True), asked(1, 5, abandoned=True))
    rows = group_rows(group(member), GroupFormat())
    assert [(row.segment, len(trained(row)), row.score) for row in rows] == [(1, 5, 0.25), (0, 3, 0.25)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from(["longest", "first", "last"]))
def test_every_line_of_a_program_is_trained_with_the_score_and_counts_for_its_tokens(
    lengths: list[int], rule: MainLine
) -> None:
    member = a_member(*(asked(n, tokens) for n, tokens in enumerate(lengths)), rule=rule)
    rows = group_rows(group(member), GroupFormat())
    assert sorted((row.segment, len(trained(row))) for row in rows) == list(enumerate(lengths))
    assert {row.score for row in rows} == {0.25}
    assert [row.segment for row in rows if row.main] == [member.trajectory.segment]
    assert sum(row.weight for row in rows) == pytest.approx(1.0)
    assert all(row.weight == pytest.approx(lengths[row.segment] / sum(lengths)) for row in rows)
    # With a mean loss of each row this is the loss of one long line.
    losses = {row.segment: [0.1 * t * row.segment for t in trained(row)] for row in rows}
    together = [loss for of_row in losses.values() for loss in of_row]
    weighted = sum(row.weight * sum(losses[row.segment]) / len(losses[row.segment]) for row in rows)
    assert weighted == pytest.approx(sum(together) / len(together))


def test_settings_say_otherwise() -> None:
    program, ours = a_member(asked(0, 3), asked(1, 1)), a_member(asked(0, 3), asked(1, 1), kind="code")
    found = {
        (member.attempt.plan.agent.kind, wanted): [
            (row.score, row.weight, len(trained(row)))
            for row in group_rows(group(member), GroupFormat(all_segments=wanted))
        ]
        for member in (program, ours)
        for wanted in (None, False, True)
    }
    one, all_lines = [(0.25, 1.0, 3), (None, 0.0, 0)], [(0.25, 0.75, 3), (0.25, 0.25, 1)]
    assert found == {
        ("program", None): all_lines,
        ("program", False): one,
        ("program", True): all_lines,
        ("code", None): one,
        ("code", False): one,
        ("code", True): all_lines,
    }
    assert len(GroupFormat().groups(group(program))) == 1


def test_lines_without_ids_count_for_what_the_endpoint_counted() -> None:
    bare = [
        replace(turn, prompt_ids=None, completion=replace(turn.completion, tokens_T=None, logprobs_T=None))
        for turn in (asked(0, 3), asked(1, 1))
    ]
    rows = group_rows(group(a_member(*bare)), GroupFormat())
    assert [(row.token_source, row.weight) for row in rows] == [("none", 0.75), ("none", 0.25)]


def test_a_line_that_does_not_add_up_counts_for_nothing() -> None:
    torn = replace(asked(1, 1), completion=replace(asked(1, 1).completion, logprobs_T=(0.5,)))
    main, side = group_rows(group(a_member(asked(0, 3), torn)), GroupFormat())
    assert (main.weight, side.weight, side.completion_ids) == (1.0, 0.0, ())


def test_hundreds_of_lines_are_read_once_each() -> None:
    """Hypothetical budgets: what each line costs does not grow with their number."""
    member = a_member(*(asked(n, 1) for n in range(300)), asked(300, 5))
    rows = group_rows(group(member), GroupFormat())
    assert len(rows) == 301
    assert [row.segment for row in rows if row.main] == [300]


def test_records_of_earlier_versions_are_read_by_their_rule() -> None:
    line = json.loads(
        dumps(attempt_line(a_member(asked(0, 1, talk=OTHER), asked(1, 2), asked(2, 9), rule="question")))
    )
    del line["plan"]["agent"]["main_line"], line["untrained_share"]
    told = read_attempt(dumps(line))
    assert (told.segment, told.agent.main_line, told.untrained_share) == (1, "question", None)
    assert recorded_rows(told, GroupFormat())[0].segment == 1
    unscored = {**line, "outcome": "llm_error", "score": None, "score_parts": None, "segment": None}
    (row,) = recorded_rows(read_attempt(dumps(unscored)), GroupFormat(), question=QUESTION)
    assert row.segment == 1


# ---------------------------------------------------------------- one line for each rollout


def test_a_groups_file_has_the_longest_line_and_says_what_it_leaves_out() -> None:
    member = a_member(asked(0, 1), asked(1, 6), asked(2, 1))
    (line,) = GroupFormat().groups(group(member))
    assert line["masks"] == [[MASKED, 1, 2, 3, 4, 5, 6]]
    (facts,) = line["overrides"]
    assert (facts["segment"], facts["main_segment"], facts["weight"], facts["untrained_share"]) == (
        1,
        1,
        1.0,
        0.25,
    )
    assert read_attempt(dumps(attempt_line(member))).untrained_share == 0.25
    written = read_written_group(dumps(line))
    assert (written.sampled, written.untrained) == (8, 2)


def test_side_lines_that_a_groups_file_has_share_the_rollout_with_the_main_one() -> None:
    """The second member has one side line less, so no group has its fellow's second one."""
    one, two = a_member(asked(0, 6), asked(1, 3), asked(2, 1)), a_member(asked(0, 2), asked(1, 2), index=1)
    lines = GroupFormat(all_segments=True).groups(group(one, two))
    facts = [[(f["segment"], f["weight"], f["untrained_share"]) for f in line["overrides"]] for line in lines]
    assert facts == [
        [(0, pytest.approx(6 / 9), pytest.approx(0.1)), (0, 0.5, 0.0)],
        [(1, pytest.approx(3 / 9), pytest.approx(0.1)), (1, 0.5, 0.0)],
    ]


def test_lines_without_a_token_share_alike() -> None:
    facts = [{"untrained_share": 1.0, "weight": 1.0}, {"untrained_share": 1.0, "weight": 1.0}]
    settle(facts)
    assert facts == [{"untrained_share": 1.0, "weight": 0.5}] * 2


@pytest.mark.parametrize("all_segments", [False, True])
def test_the_closing_table_has_the_share_that_is_left_out(all_segments: bool) -> None:
    one, two = a_member(asked(0, 6), asked(1, 3), asked(2, 1)), a_member(asked(0, 2), asked(1, 2), index=1)
    made = group(one, two)
    (first, *_) = lines = GroupFormat(all_segments=all_segments).groups(made)
    tally, resumed = Tally(all_segments=all_segments), Tally(all_segments=all_segments)
    tally.group(made)
    resumed.earlier_group(read_written_group(dumps(first)))
    said = []
    for one_tally in (tally, resumed):
        stream = io.StringIO()
        closing_table(one_tally, [], stream)
        said += [line for line in stream.getvalue().splitlines() if line.startswith("untrained")]
    share = {True: "7% of the 14", False: "43% of the 14"}[all_segments]
    assert len(lines) == 1 + all_segments
    assert (
        said
        == [f"untrained      {share} tokens sampled in written groups, in lines that the groups file leaves out"]
        * 2
    )


# ---------------------------------------------------------------- checks


FAULTS: dict[str, Any] = {
    "another main line": lambda facts: facts.update(main_segment=0),
    "a share that is too small": lambda facts: facts.update(untrained_share=0.1),
    "a weight that is too small": lambda facts: facts.update(weight=0.5),
    "no number": lambda facts: facts.update(weight="1"),
    "no share": lambda facts: facts.pop("untrained_share"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_verify_finds_another_main_line_and_other_shares(fault: str | None) -> None:
    member = a_member(asked(0, 1), asked(1, 6), asked(2, 1))
    (line,) = json.loads(dumps(GroupFormat().groups(group(member))))
    if fault is not None:
        FAULTS[fault](line["overrides"][0])
    findings = Findings()
    check_group(line, "line 1", findings, {member.attempt.plan.rollout_id: dumps(attempt_line(member))})
    assert bool(findings.failed["lines"]) == (fault is not None)
    assert findings.checked["lines"] == 2


def test_a_record_whose_main_line_is_not_that_of_its_rule_is_found() -> None:
    member = a_member(asked(0, 1), asked(1, 6), rule="first")
    line = json.loads(dumps(attempt_line(member)))
    line["plan"]["agent"]["main_line"] = "longest"
    (written,) = json.loads(dumps(GroupFormat().groups(group(member))))
    findings = Findings()
    check_group(written, "line 1", findings, {member.attempt.plan.rollout_id: dumps(line)})
    assert findings.failed["lines"] == 1


# ---------------------------------------------------------------- settings


def test_the_main_line_of_a_program_is_a_setting_and_that_of_ours_is_not() -> None:
    program = {"agent": "program:x.py"}
    assert load_config(env=program).agent_spec().main_line == "longest"
    assert load_config(env={**program, "main_line": "auto"}).agent_spec().main_line == "longest"
    assert load_config(env={**program, "main_line": "first"}).agent_spec().main_line == "first"
    assert load_config().agent_spec().main_line == "question"
    with pytest.raises(ConfigError, match=r"env\.main_line: is for env\.agent program:PATH, not tool_calling"):
        load_config(env={"agent": "tool_calling", "main_line": "longest"})
    assert load_config(env={"trained_segments": "auto"}).env.all_segments is None


def test_plans_and_managed_agents_are_never_the_main_line() -> None:
    turns = (
        replace(asked(0, 9), kind=CompletionKind.PLAN),
        replace(asked(1, 9), agent="helper"),
        asked(2, 1),
    )
    for rule in ("longest", "first", "last", "question"):
        assert main_segment(turns, QUESTION, rule) == 2
