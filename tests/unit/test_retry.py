"""Retries of inference calls: bounded, jittered, and all calls of an endpoint wait together."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from orchestrator.completion.retry import (
    MAX_RETRY_AFTER_S,
    Limiter,
    Retryable,
    RetryPolicy,
    retry_after_s,
    with_retries,
)
from orchestrator.errors import CompletionError
from orchestrator.rules.backoff import Backoff

QUICK = RetryPolicy(attempts=4, backoff=Backoff(0.001, 0.002), pauses=3)


class Calls:
    """Fails as told, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.made = 0

    async def __call__(self) -> str:
        self.made += 1
        if self._failures:
            raise self._failures.pop(0)
        return "answer"


async def test_passing_faults_are_retried_and_counted() -> None:
    calls = Calls(Retryable("reset"), Retryable("HTTP 500"))
    assert await with_retries(calls, QUICK, 10.0) == ("answer", 2)


async def test_attempts_are_bounded_and_the_last_fault_is_named() -> None:
    calls = Calls(*[Retryable(f"HTTP 500 number {n}") for n in range(9)])
    with pytest.raises(CompletionError, match="number 3"):
        await with_retries(calls, QUICK, 10.0)
    assert calls.made == 4


async def test_other_errors_are_not_retried() -> None:
    calls = Calls(CompletionError("HTTP 404"))
    with pytest.raises(CompletionError, match="404"):
        await with_retries(calls, QUICK, 10.0)
    assert calls.made == 1


async def test_being_asked_to_wait_is_no_fault_but_has_an_end() -> None:
    asked = [Retryable("HTTP 429", after_s=0.001) for _ in range(100)]
    patient = Calls(*asked[:3], Retryable("reset"), Retryable("reset"))
    assert await with_retries(patient, QUICK, 10.0) == ("answer", 5)
    hopeless = Calls(*asked)
    with pytest.raises(CompletionError, match="7 attempts"):
        await with_retries(hopeless, QUICK, 10.0)


async def test_too_many_without_a_time_holds_everybody_for_longer_and_longer() -> None:
    error = Retryable("HTTP 429", status=429)
    policy = RetryPolicy()
    assert [policy.asked_s(error, pauses) for pauses in (0, 1, 2, 9)] == [1.0, 2.0, 4.0, 30.0]
    assert policy.asked_s(Retryable("HTTP 429", after_s=7.0, status=429), 3) == 7.0
    assert policy.asked_s(Retryable("HTTP 500", status=500), 0) is None
    quick = RetryPolicy(attempts=1, backoff=Backoff(0.001, 8.0), pauses=3, pause=Backoff(0.001, 30.0))
    limiter = Limiter()
    assert await with_retries(Calls(error, error, error), quick, 60.0, limiter) == ("answer", 3)
    assert limiter.open_at() > 0


async def test_total_deadline_bounds_calls_and_waits() -> None:
    async def hangs() -> str:
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(CompletionError, match="no completion within"):
        await with_retries(hangs, QUICK, 0.05)
    # A pause that would end past the deadline is not waited for.
    calls = Calls(Retryable("HTTP 429", after_s=50.0))
    with pytest.raises(CompletionError, match="429"):
        await with_retries(calls, QUICK, 5.0)
    assert calls.made == 1


async def test_a_pause_holds_every_call_of_the_endpoint() -> None:
    limiter, order = Limiter(), []
    asked = asyncio.Event()

    async def told_to_wait() -> str:
        if not asked.is_set():
            asked.set()
            raise Retryable("HTTP 429", after_s=0.3)
        order.append("after the pause")
        return "answer"

    async def another() -> str:
        order.append("another")
        return "answer"

    async def unpaused() -> None:
        await asyncio.sleep(0.15)
        order.append("half of the pause")

    async with asyncio.TaskGroup() as tg:
        tg.create_task(with_retries(told_to_wait, QUICK, 10.0, limiter))
        await asked.wait()
        await asyncio.sleep(0)
        tg.create_task(with_retries(another, QUICK, 10.0, limiter))
        tg.create_task(with_retries(another, QUICK, 10.0, Limiter()))
        tg.create_task(unpaused())
    assert order[:2] == ["another", "half of the pause"]  # the one of another endpoint
    assert sorted(order[2:]) == ["after the pause", "another"]


async def test_a_longer_pause_wins_over_a_shorter_one() -> None:
    limiter = Limiter()
    limiter.pause(5.0)
    until = limiter.open_at()
    limiter.pause(1.0)
    assert limiter.open_at() == until


async def test_no_pause_costs_nothing() -> None:
    with pytest.raises(StopIteration):  # it ends without waiting for anything
        Limiter().passed().send(None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("0", 0.0),
        ("2.5", 2.5),
        ("-3", 0.0),
        ("999999", MAX_RETRY_AFTER_S),
        ("inf", MAX_RETRY_AFTER_S),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_read_and_bounded(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    seconds = retry_after_s(date)
    assert seconds is not None
    assert 20.0 < seconds <= 30.0


def test_waits_grow_up_to_the_cap_and_are_spread() -> None:
    policy = RetryPolicy(backoff=Backoff(first_s=1.0, most_s=4.0, spread=0.5))
    waits = [[policy.wait_s(n) for _ in range(50)] for n in (1, 2, 3, 9)]
    for wait, middle in zip(waits, (1.0, 2.0, 4.0, 4.0), strict=True):
        assert middle / 2 <= min(wait) < max(wait) <= middle * 1.5
