"""A task begins near its end only on a way each of whose turns can be begun at."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from orchestrator.engine.starts import _can_begin_anywhere
from orchestrator.run.line import recorded_attempt
from tests.fakes.plans import TALK, a_record, a_turn, an_attempt


@pytest.mark.parametrize(("second_began_s", "can"), [(1.0, True), (0.5, False)])
def test_turns_that_a_program_asked_for_side_by_side_are_no_way(second_began_s: float, can: bool) -> None:
    """The last turn can be begun at, an earlier one cannot: k would fall to it in the midst of a run."""
    times = ((0.0, 1.0), (second_began_s, 2.0), (3.0, 4.0))
    turns = tuple(replace(a_turn(sequence=n), started_s=b, ended_s=e) for n, (b, e) in enumerate(times, 1))
    attempt = replace(an_attempt(), record=replace(a_record(), turns=turns))
    assert _can_begin_anywhere(recorded_attempt(attempt)) is can


def test_a_long_rollout_is_looked_at_once() -> None:
    turns = [
        replace(a_turn(sequence=n + 1), kept=n * len(TALK), started_s=2.0 * n, ended_s=2.0 * n + 1)
        for n in range(500)
    ]
    attempt = recorded_attempt(replace(an_attempt(), record=replace(a_record(), turns=tuple(turns))))
    began_s = time.process_time()
    assert _can_begin_anywhere(attempt)
    assert time.process_time() - began_s < 2, "not the conversation of every turn for every turn"
