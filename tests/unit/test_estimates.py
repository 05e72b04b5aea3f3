"""pass@k and intervals against other ways of computing them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.estimates import estimate_pass_at_k, pass_at_k, sizes_of_k, wilson


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_sample(samples: int) -> None:
    for correct in range(samples + 1):
        right = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(right, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_is_finite() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(1024, 0, 512) == 0.0
    assert pass_at_k(1024, 1024, 1) == 1.0


@pytest.mark.parametrize(("samples", "correct", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_was_not_drawn(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=str(samples)):
        pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [
        # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3.
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_an_interval_lies_in_0_to_1_and_holds_what_was_seen(share: float, n: int) -> None:
    low, high = wilson(share, n)
    assert 0.0 <= low <= share <= high <= 1.0
    assert math.isfinite(high - low)


def test_tasks_are_the_n_not_their_samples() -> None:
    few = estimate_pass_at_k([(1, 1), (1, 0)], 1)
    many = estimate_pass_at_k([(100, 100), (100, 0)], 1)
    assert few == many
    assert few is not None
    assert (few.value, few.tasks) == (0.5, 2)


def test_tasks_with_fewer_than_k_samples_say_nothing_of_pass_at_k() -> None:
    found = estimate_pass_at_k([(4, 4), (3, 3), (0, 0)], 4)
    assert found is not None
    assert (found.value, found.tasks) == (1.0, 1)
    assert estimate_pass_at_k([(3, 3)], 4) is None
    assert estimate_pass_at_k([], 1) is None


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_the_sizes_of_k_are_powers_of_two_and_the_number_itself(samples: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of_k(samples) == sizes
