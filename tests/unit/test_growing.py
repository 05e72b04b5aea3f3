"""Which of a trunk's turns others branch at, and what is said where they cannot."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from orchestrator.engine import trees
from orchestrator.engine.trees import FLAG, Branching
from orchestrator.errors import ConfigError
from orchestrator.rules.forks import BranchRule
from orchestrator.types import Member
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


RELEASE = threading.Event()


def never(trunk: Member) -> list[tuple[int, int]]:
    RELEASE.wait()
    return []


async def test_no_end_of_the_process_waits_for_a_function_that_never_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "FUNCTION_LIMIT_S", 0.05)
    try:
        with pytest.raises(ConfigError, match="never took more than"):
            await Branching(BranchRule.parse(f"python:{__name__}:never")).grown(tree().members_G[0], [a_plan(1)])
        (waiting,) = [thread for thread in threading.enumerate() if thread.name == FLAG]
        assert waiting.daemon
    finally:
        RELEASE.set()
