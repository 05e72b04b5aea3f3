"""Side lines become groups of exactly the group's size, or none."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.report.details import rollout_details
from orchestrator.report.from_groups import rollout_lines
from orchestrator.run.groups import GroupFormat, side_groups
from orchestrator.run.line import attempt_line
from orchestrator.types import Completion, CompletionKind, Group, Member, Task, Turn
from tests.fakes.plans import TALK, a_member, a_turn


def sampled(*ids: int) -> Completion:
    return Completion("x", "x", "stop", ids, tuple(-0.5 for _ in ids), 1, len(ids), "v1")


def turn(sequence: int, segment: int, kind: CompletionKind = CompletionKind.ACTION) -> Turn:
    base = a_turn(sequence=sequence, completion=sampled(10 * segment + sequence))
    return replace(base, segment=segment, prompt_ids=(1, 2), kind=kind)


def member(index: int, *segments: int) -> Member:
    """Plans in the given segments, then an action in segment 0."""
    turns = [turn(n + 1, s, CompletionKind.PLAN) for n, s in enumerate(segments)]
    turns.append(turn(len(turns) + 1, 0))
    given = a_member(index)
    return replace(given, attempt=replace(given.attempt, record=replace(given.attempt.record, turns=tuple(turns))))


def group(*members: Member) -> Group:
    return Group(0, Task("task", "?", "42"), members, tuple(m.attempt for m in members))


def test_a_side_line_that_all_members_have_is_a_group_of_its_own() -> None:
    sides = side_groups(group(member(0, 1), member(1, 1)), GroupFormat())
    assert [len(side.members_G) for side in sides] == [2]
    assert [m.trajectory.segment for m in sides[0].members_G] == [1, 1]
    assert sides[0].members_G[0].trajectory.tokens_T == (1, 2, 11)


def test_a_side_line_that_one_member_lacks_is_left_out() -> None:
    assert len(side_groups(group(member(0, 1, 2), member(1, 1)), GroupFormat())) == 1
    assert side_groups(group(member(0, 1), member(1)), GroupFormat()) == []


def test_a_side_line_that_does_not_add_up_ends_nothing() -> None:
    broken = member(0, 1)
    side, main = broken.attempt.record.turns
    torn = replace(side, completion=replace(side.completion, logprobs_T=(0.5,)))
    record = replace(broken.attempt.record, turns=(torn, main))
    given = group(replace(broken, attempt=replace(broken.attempt, record=record)), member(1, 1))
    assert side_groups(given, GroupFormat()) == []
    assert len(GroupFormat(all_segments=True).groups(given)) == 1


def test_side_lines_are_only_written_when_asked_for() -> None:
    given = group(member(0, 1), member(1, 1))
    assert len(GroupFormat().groups(given)) == 1
    lines = GroupFormat(all_segments=True).groups(given)
    assert [[o["segment"] for o in line["overrides"]] for line in lines] == [[0, 0], [1, 1]]
    assert [o["untrained_completions"] for o in lines[0]["overrides"]] == [1, 1]


def test_what_was_asked_besides_is_told() -> None:
    (line,) = GroupFormat().groups(group(member(0, 1, 2, 2), member(1)))
    first, second = line["overrides"]
    assert second["other_segments"] == []
    assert [(o["segment"], o["kind"], o["completions"]) for o in first["other_segments"]] == [
        (1, "plan", 1),
        (2, "plan", 2),
    ]
    assert first["other_segments"][0]["asked"] == TALK[-1].content
    assert (first["main_segment"], first["segments"], first["untrained_completions"]) == (0, 3, 3)


def test_a_report_of_groups_alone_shows_rollouts_that_began_with_a_plan() -> None:
    """Their main line is not the first one."""
    planned = member(0)
    plan, action = replace(turn(1, 0, CompletionKind.PLAN)), replace(turn(2, 1))
    record = replace(planned.attempt.record, turns=(plan, action))
    line = replace(planned.trajectory, segment=1)
    planned = replace(planned, attempt=replace(planned.attempt, record=record), trajectory=line)
    main, side = GroupFormat(all_segments=True).groups(group(planned))
    assert (main["overrides"][0]["segment"], side["overrides"][0]["segment"]) == (1, 0)
    assert len(list(rollout_lines(main, 0))) == 1
    assert list(rollout_lines(side, 0)) == []


def test_the_report_tells_what_was_asked_aside() -> None:
    details = rollout_details(attempt_line(member(0, 1)))
    assert [c["aside"] for c in details["completions"]] == [True, False]
    assert attempt_line(member(0, 1))["segment"] == 0
    assert [c["aside"] for c in rollout_details(attempt_line(member(0, 1).attempt))["completions"]] == [
        False,
        False,
    ]


def test_rollouts_of_several_versions_can_be_masked() -> None:
    mixed = member(0, 1)
    turns = list(mixed.attempt.record.turns)
    turns[0] = replace(turns[0], completion=replace(turns[0].completion, policy_version="v2"))
    record = replace(mixed.attempt.record, turns=tuple(turns))
    given = group(replace(mixed, attempt=replace(mixed.attempt, record=record)), member(1, 1))
    (line,) = GroupFormat(mixed_versions=False).groups(given)
    assert set(line["masks"][0]) == {-100}
    assert set(line["masks"][1]) != {-100}
    assert [o["mixed_policy_versions"] for o in line["overrides"]] == [True, False]
