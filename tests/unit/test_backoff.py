"""Pauses between tries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.backoff import Backoff


def test_a_pause_doubles_up_to_the_longest_and_nothing_is_waited_for_before_a_failure() -> None:
    backoff = Backoff(first_s=0.5, most_s=3.0)
    assert [backoff.pause_s(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 1 << 62), st.floats(0, 1))
def test_no_number_of_failures_and_no_chance_leads_beyond_the_spread(failures: int, chance: float) -> None:
    pause_s = Backoff(first_s=0.25, most_s=8.0, spread=0.5).pause_s(failures, chance)
    assert 0.125 <= pause_s <= 12.0
