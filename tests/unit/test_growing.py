"""Which of a trunk's turns others branch at, and what is said where they cannot."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from orchestrator.engine.trees import Branching
from orchestrator.rules.forks import BranchRule
from tests.fakes.plans import a_plan
from tests.fakes.trees import tree


async def test_a_turn_that_nothing_branches_at_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    trunk = tree().members_G[0]
    first, second, third = trunk.attempt.record.turns
    beside = replace(first, ended_s=second.started_s + 0.5)  # a program asked for both at a time
    record = replace(trunk.attempt.record, turns=(beside, second, third))
    trunk = replace(trunk, attempt=replace(trunk.attempt, record=record))
    branching, plans = Branching(BranchRule.parse("turns:2,3 width:1")), [a_plan(1), a_plan(2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drawn_whole, branch = await branching.grown(trunk, plans)
            assert drawn_whole.prefix is None
            assert branch.prefix is not None
    (told,) = [one.getMessage() for one in caplog.records]
    assert "nothing branches from rollout g000000-r00-a0 at turn 2" in told
    assert "while another completion was under way" in told
