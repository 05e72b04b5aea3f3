"""Steps are the main agent's wherever they are counted: a managed agent's are part of the step that called it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.atropos.tracking import Metrics
from orchestrator.evaluation.measured import spent
from orchestrator.report.reader import read_run
from orchestrator.run.groups import scored_data_group
from orchestrator.scorers.quality import quality
from orchestrator.types import CompletionKind, Ended, EndedName, Group, Member
from tests.fakes.plans import a_member, a_turn
from tests.fakes.written import write_run


def with_a_helper() -> Member:
    """Two steps and a plan of the main agent; in its first step the helper took three."""
    helper = [replace(a_turn(sequence=n), agent="helper") for n in (3, 4, 5)]
    plan = replace(a_turn(sequence=1), kind=CompletionKind.PLAN)
    turns = (plan, a_turn(sequence=2), *helper, a_turn(sequence=6))
    member = a_member()
    return replace(member, attempt=replace(member.attempt, record=replace(member.attempt.record, turns=turns)))


def test_one_count_of_steps_for_all_who_tell_it(tmp_path: Path) -> None:
    member = with_a_helper()
    metrics = Metrics()
    metrics.attempt(member)
    write_run(tmp_path / "run", member, facts={"config": {}})
    (shown,) = read_run(tmp_path / "run", tmp_path / "groups.jsonl").rollouts.values()
    told = {
        "groups file": scored_data_group(Group(0, member.attempt.plan.task, (member,), ()))["overrides"][0][
            "steps"
        ],
        "evaluation": spent(member.attempt)["steps"],
        "tracking": metrics.taken()["rollout/steps"],
        "report": shown["steps"],
    }
    assert set(told.values()) == {2}, told
    plan = replace(member.attempt.plan, agent=replace(member.attempt.plan.agent, max_steps=3))
    parts = quality(plan, member.attempt.record, Ended(EndedName.FINISHED), 0.0)
    assert parts["efficiency"] == 0.5
