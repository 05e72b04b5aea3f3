"""What a group is made of when rollouts break, or all score the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.engine.group import MOST_IN_VAIN, GroupPolicy, Unfinished, run_group
from orchestrator.engine.trees import Branching
from orchestrator.rules.forks import BranchRule
from orchestrator.rules.plan import backfill
from orchestrator.types import (
    Attempt,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Group,
    Member,
    Prefix,
    RolloutPlan,
    Score,
    Trajectory,
)
from orchestrator.types.prefix import branching
from tests.fakes.plans import TALK, a_plan, a_record

SIZE = 4
BROKEN = Failed(FailedName.LLM_ERROR, "HTTP 500")
Outcome = float | Failed | None
TURNS = tuple(replace(turn, started_s=n, ended_s=n + 0.5) for n, turn in enumerate(a_record(3).turns))
RECORD = replace(a_record(3), turns=TURNS)
LINE = Trajectory((1, 2), (False, True), None, TALK, "sampled")


class ToldExecutor:
    """Rollouts end as a function of the plan says: a score, a failure, or not at all."""

    def __init__(self, ends: Callable[[RolloutPlan], Outcome]) -> None:
        self._ends = ends
        self.plans: list[RolloutPlan] = []

    async def execute(self, plan: RolloutPlan) -> tuple[Member | Attempt, ...] | None:
        self.plans.append(plan)
        end = self._ends(plan)
        if end is None:
            return None
        if isinstance(end, Failed):
            return (Attempt(plan, a_record(), end),)
        return (Member(Attempt(plan, RECORD, Ended(EndedName.FINISHED)), LINE, Score(end)),)


async def group_of(
    policy: str,
    ends: Callable[[RolloutPlan], Outcome],
    variance: str = "keep",
    branch: str = "",
    prefix: Prefix | None = None,
) -> Group:
    executor = ToldExecutor(ends)
    plans = [replace(a_plan(index), prefix=prefix) for index in range(SIZE)]
    group = await run_group(
        plans[0].task,
        plans,
        executor,  # type: ignore[arg-type]
        GroupPolicy.parse(policy, variance),  # type: ignore[arg-type]
        lambda plan: backfill(plan, 0, 0),
        Branching(BranchRule.parse(branch)) if branch else None,
    )
    assert len(group.attempts) == len(executor.plans)
    assert len({plan.rollout_id for plan in executor.plans}) == len(executor.plans)
    assert [m.attempt.plan.index for m in group.members_G] == sorted(
        {m.attempt.plan.index for m in group.members_G}
    )
    return group


def indexes(group: Group) -> list[int]:
    return [m.attempt.plan.index for m in group.members_G]


def spread(plan: RolloutPlan) -> float:
    return plan.index / SIZE


async def test_backfill_puts_another_rollout_with_another_seed_in_the_place() -> None:
    group = await group_of("backfill", lambda p: BROKEN if p.index == 2 and p.attempt < 2 else spread(p))
    assert group.dropped is None
    assert indexes(group) == [0, 1, 2, 3]
    seeds = [a.plan.sampling.seed for a in group.attempts if a.plan.index == 2]
    assert len(seeds) == len(set(seeds)) == 3


async def test_backfill_ends_after_as_many_rollouts_as_the_group_has() -> None:
    group = await group_of("backfill", lambda p: BROKEN if p.index == 2 else spread(p))
    assert group.dropped == "3 of 4 rollouts usable, mostly llm_error: HTTP 500"
    assert len(group.attempts) == 2 * SIZE


async def test_where_all_break_only_two_are_tried_in_their_places() -> None:
    group = await group_of("backfill", lambda p: BROKEN)
    assert group.dropped == "0 of 4 rollouts usable, mostly llm_error: HTTP 500"
    assert len(group.attempts) == SIZE + MOST_IN_VAIN


async def test_where_all_broke_and_one_more_did_not_the_others_are_drawn_too() -> None:
    group = await group_of("backfill", lambda p: BROKEN if p.attempt == 0 else spread(p))
    assert group.dropped is None
    assert indexes(group) == [0, 1, 2, 3]
    assert len(group.attempts) == 2 * SIZE


async def test_drop_runs_nothing_anew() -> None:
    group = await group_of("drop", lambda p: BROKEN if p.index == 2 else spread(p))
    assert group.dropped is not None
    assert len(group.attempts) == SIZE


@pytest.mark.parametrize(("policy", "kept"), [("partial:3", True), ("partial:4", False)])
async def test_partial_keeps_a_group_of_enough(policy: str, kept: bool) -> None:
    group = await group_of(policy, lambda p: BROKEN if p.index == 2 else spread(p))
    assert (group.dropped is None) == kept
    assert indexes(group) == [0, 1, 3]


async def test_bad_task_is_not_backfilled() -> None:
    bad = Failed(FailedName.BAD_TASK, "no such file")
    group = await group_of("backfill", lambda p: bad)
    assert group.dropped == "0 of 4 rollouts usable, mostly bad_task: no such file"
    assert len(group.attempts) == SIZE


async def test_stopped_run_leaves_the_group_unfinished() -> None:
    with pytest.raises(Unfinished):
        await group_of("partial:1", lambda p: None if p.index == 3 else spread(p))


async def test_equal_scores_are_kept_unless_asked_otherwise() -> None:
    assert (await group_of("backfill", lambda p: 0.5)).dropped is None
    dropped = await group_of("backfill", lambda p: 0.5, "drop")
    assert dropped.dropped == "all 4 rollouts have the same score, 0.5"
    assert (await group_of("backfill", spread, "drop")).dropped is None


async def test_equal_scores_are_drawn_once_more_and_then_kept() -> None:
    second = await group_of("backfill", lambda p: 0.5 if p.attempt == 0 else spread(p), "resample")
    assert [m.score.value for m in second.members_G] == [0.0, 0.25, 0.5, 0.75]
    assert len(second.attempts) == 2 * SIZE
    equal_again = await group_of("backfill", lambda p: 0.5, "resample")
    assert equal_again.dropped is None
    assert len(equal_again.attempts) == 2 * SIZE
    assert {m.attempt.plan.attempt for m in equal_again.members_G} == {1}


async def test_second_draw_that_breaks_leaves_the_first() -> None:
    group = await group_of("drop", lambda p: 0.5 if p.attempt == 0 else BROKEN, "resample")
    assert group.dropped is None
    assert {m.attempt.plan.attempt for m in group.members_G} == {0}


async def test_different_scores_are_not_drawn_again() -> None:
    assert len((await group_of("backfill", spread, "resample")).attempts) == SIZE


@pytest.mark.parametrize("text", ["", "keep", "partial", "partial:0", "partial:-1", "partial:x", "drop:1"])
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="valid are"):
        GroupPolicy.parse(text)


@pytest.mark.parametrize("policy", ["backfill", "drop", "partial:2"])
async def test_no_other_rollout_is_drawn_in_the_place_of_a_program_that_failed(policy: str) -> None:
    failed = Failed(FailedName.AGENT_ERROR, "no completion: exit code 1\nTraceback")
    group = await group_of(policy, lambda plan: failed if plan.index < 2 else spread(plan))
    assert len(group.attempts) == SIZE
    assert indexes(group) == [2, 3]
    lost = "2 of 4 rollouts usable, mostly agent_error: no completion: exit code 1"
    assert group.dropped == (None if policy == "partial:2" else lost)


# ------------------------------------------------------------ trees


def prefixes(group: Group) -> dict[str, int | None]:
    """Of each attempt, the turn at which it was to branch."""
    plans = [attempt.plan for attempt in group.attempts]
    return {p.rollout_id: p.prefix.branch.turn if p.prefix and p.prefix.branch else None for p in plans}


async def test_branches_follow_their_trunk_and_keep_their_places_and_seeds() -> None:
    group = await group_of("backfill", spread, branch="turns:2 width:1")
    assert prefixes(group) == {
        "g000000-r00-a0": None,
        "g000000-r01-a0": 2,
        "g000000-r02-a0": None,
        "g000000-r03-a0": 2,
    }
    branches = [attempt.plan for attempt in group.attempts if attempt.plan.prefix is not None]
    assert [plan.prefix.branch.parent for plan in branches if plan.prefix and plan.prefix.branch] == [
        "g000000-r00-a0",
        "g000000-r02-a0",
    ]
    assert [plan.sampling for plan in branches] == [a_plan(1).sampling, a_plan(3).sampling]


async def test_a_turn_that_the_trunk_lacks_is_drawn_whole() -> None:
    group = await group_of("backfill", spread, branch="turns:2,9 width:1 trunk:masked")
    assert prefixes(group) == {
        "g000000-r00-a0": None,
        "g000000-r01-a0": 2,
        "g000000-r02-a0": None,
        "g000000-r03-a0": None,
    }


async def test_where_a_trunk_breaks_for_good_its_places_are_drawn_whole() -> None:
    def ends(plan: RolloutPlan) -> Outcome:
        return BROKEN if (plan.index, plan.attempt) == (0, 0) else spread(plan)

    group = await group_of("backfill", ends, branch="turns:2 width:3")
    assert indexes(group) == [0, 1, 2, 3]
    assert set(prefixes(group).values()) == {None}


async def test_a_refused_branch_is_replaced_by_a_whole_rollout() -> None:
    refused = Failed(FailedName.RECORD_ERROR, "prompt 2 is not the recorded one")

    def ends(plan: RolloutPlan) -> Outcome:
        return refused if plan.prefix is not None and plan.index == 2 else spread(plan)

    group = await group_of("backfill", ends, branch="turns:2 width:3")
    assert prefixes(group) == {
        "g000000-r00-a0": None,
        "g000000-r01-a0": 2,
        "g000000-r02-a0": 2,
        "g000000-r02-a1": None,
        "g000000-r03-a0": 2,
    }
    assert indexes(group) == [0, 1, 2, 3]


async def test_a_second_draw_grows_from_its_own_trunk() -> None:
    group = await group_of("backfill", lambda plan: 0.5, "resample", "turns:2 width:3")
    branches = [m.attempt.plan.prefix.branch for m in group.members_G if m.attempt.plan.prefix is not None]
    assert [branch.parent for branch in branches if branch] == ["g000000-r00-a1"] * 3


async def test_a_second_draw_of_tasks_begun_near_their_end_begins_there_too() -> None:
    """Else the turn of a task whose groups are all solved would never fall."""
    prefix = branching("g000007-r00-a0", RECORD, 3, run="earlier")
    group = await group_of("backfill", lambda plan: 1.0, "resample", prefix=prefix)
    assert set(prefixes(group).values()) == {3}
