"""The rollout's own clock stands still while the sandbox waits for us."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orchestrator.proxy.clock import OwnClock
from orchestrator.rules.waits import ran, running_timeout, standstill


class ManualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer instead of passing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def stand_still(self, seconds: float) -> None:
        """As a process that was stopped, or got no CPU."""
        self._now += seconds

    def _run_once(self) -> None:
        live = [timer._when for timer in self._scheduled if not timer._cancelled]  # type: ignore[attr-defined]
        if live and not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, min(live))
        super()._run_once()  # type: ignore[misc]


def manual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on a loop whose time is made."""

    @functools.wraps(test)
    def run() -> None:
        loop = ManualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            loop.close()

    del run.__wrapped__  # pytest would see a coroutine function behind it
    return run


@manual
async def test_waiting_for_completions_is_told_apart_from_waiting_for_tools() -> None:
    clock = OwnClock(10.0)
    clock.start()
    with clock.waiting():
        await asyncio.sleep(5)
        with clock.waiting(sampling=True):
            await asyncio.sleep(2)
            assert (clock.waiting_s, clock.sampling_s) == (7, 2)
        await asyncio.sleep(1)
    await asyncio.sleep(1)
    with clock.waiting(sampling=True), clock.waiting(sampling=True):
        await asyncio.sleep(3)
    assert (clock.own_s, clock.waiting_s, clock.sampling_s) == (1, 11, 5)


@manual
async def test_waiting_uses_up_nothing() -> None:
    clock = OwnClock(10.0)
    clock.start()
    expired = asyncio.ensure_future(clock.expired())
    await asyncio.sleep(6)
    with clock.waiting():
        await asyncio.sleep(1000)
    assert not expired.done()
    assert clock.own_s == pytest.approx(6)
    assert clock.waiting_s == pytest.approx(1000)
    before = asyncio.get_running_loop().time()
    await expired
    assert asyncio.get_running_loop().time() - before == pytest.approx(4)


@manual
async def test_overlapping_waits_count_once() -> None:
    clock = OwnClock(10.0)
    clock.start()
    with clock.waiting():
        await asyncio.sleep(3)
        with clock.waiting():
            await asyncio.sleep(3)
    assert clock.waiting_s == pytest.approx(6)
    assert clock.own_s == pytest.approx(0)


@manual
async def test_nothing_expires_before_the_start() -> None:
    clock = OwnClock(1.0)
    expired = asyncio.ensure_future(clock.expired())
    await asyncio.sleep(50)
    assert not expired.done()
    clock.start()
    await expired
    assert clock.own_s == pytest.approx(1.0)


@manual
async def test_a_standstill_of_this_process_costs_the_sandbox_one_look_at_most() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)
    clock = OwnClock(20.0)
    clock.start()
    expired = asyncio.ensure_future(clock.expired())
    for _ in range(9):
        await asyncio.sleep(0.5)
        loop.stand_still(15)
        await asyncio.sleep(0.5)
    assert 9 <= clock.own_s <= 18
    assert not expired.done()
    await expired
    assert clock.own_s == pytest.approx(20)
    assert clock.elapsed_s == pytest.approx(9 * 15 + 15.5, abs=4.5)


@manual
async def test_standstill_is_noticed_and_a_busy_moment_is_none() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)
    noticed = asyncio.ensure_future(standstill(20.0))
    await asyncio.sleep(7)
    loop.stand_still(19)
    await asyncio.sleep(20)
    assert not noticed.done()
    loop.stand_still(33)
    await asyncio.sleep(5)
    assert await noticed == pytest.approx(30, abs=5)  # all but what was left of the look


@manual
async def test_a_deadline_counts_what_ran() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)
    for stood_s in (0.0, 1000.0):
        began_s, ended = loop.time(), asyncio.ensure_future(ran(120.0, "late"))
        await asyncio.sleep(50)
        loop.stand_still(stood_s)
        assert await ended == "late"
        assert loop.time() - began_s - stood_s == pytest.approx(120, abs=2)


@manual
async def test_a_running_timeout_counts_what_ran() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)

    async def late(limit_s: float, stood_s: float) -> None:
        async with running_timeout(limit_s):
            await asyncio.sleep(0.05)
            loop.stand_still(stood_s)
            await asyncio.sleep(500)

    for limit_s in (0.2, 3.2, 120.0):
        for stood_s in (0.0, 1000.0):
            began_s = loop.time()
            with pytest.raises(TimeoutError):
                await late(limit_s, stood_s)
            assert loop.time() - began_s - stood_s == pytest.approx(limit_s, rel=0.11 if stood_s else 1e-6)
        async with running_timeout(limit_s):
            await asyncio.sleep(limit_s * 0.99)
        await asyncio.sleep(500)  # nothing of it is left
