"""How many sandboxes are in the making at a time: felt for, never shut, first come first served."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.launch import ramp as ramp_module
from orchestrator.launch.ramp import Ramp


class Machine:
    """Starts on a clock of its own: with `n` at a time each takes `n / cores` seconds, at least one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
        self.now = 0.0
        self.cores = cores
        monkeypatch.setattr(ramp_module, "now_s", lambda: self.now)

    async def starts(self, ramp: Ramp, rounds: int) -> list[int]:
        """So many rounds in which as many as may are begun and ended together; their sizes."""
        sizes = []
        for _ in range(rounds):
            size = ramp.limit
            ends = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(size):
                    tasks.create_task(self._start(ramp, ends))
                await _settle()
                self.now += max(1.0, size / self.cores)
                ends.set()
            sizes.append(size)
        return sizes

    async def _start(self, ramp: Ramp, ends: asyncio.Event) -> None:
        async with ramp.start():
            await ends.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_grows_to_what_the_machine_takes_and_not_far_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = Ramp(cores=16)
    sizes = await Machine(monkeypatch, cores=24).starts(ramp, 80)
    assert sizes[0] == 16
    assert all(24 <= size <= 56 for size in sizes[40:]), sizes


async def test_slows_down_when_the_machine_gets_crowded_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp, machine = Ramp(cores=8), Machine(monkeypatch, cores=12)
    await machine.starts(ramp, 30)
    before = ramp.limit
    assert before > 12
    machine.cores = 2
    assert (await machine.starts(ramp, 10))[-1] == 8
    machine.cores = 0.25
    assert (await machine.starts(ramp, 20))[-1] <= 4  # 16 s each
    machine.cores = 12
    assert (await machine.starts(ramp, 60))[-1] >= before - 4


async def test_failures_slow_down_but_never_shut_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = Ramp(cores=4)
    for _ in range(50):
        with pytest.raises(ZeroDivisionError):
            async with ramp.start():
                raise ZeroDivisionError
    assert ramp.limit == 1
    async with ramp.start():
        pass


async def test_first_come_first_served_and_a_cancelled_turn_is_passed_on() -> None:
    ramp, served, leave = Ramp(cores=1), [], [asyncio.Event() for _ in range(5)]

    async def start(number: int) -> None:
        async with ramp.start():
            served.append(number)
            await leave[number].wait()

    tasks = [asyncio.create_task(start(number)) for number in range(5)]
    await _settle()
    assert served == [0]
    tasks[1].cancel()  # while it waits
    leave[0].set()
    tasks[2].cancel()  # its turn may have come by now, or comes together with the cancel
    await asyncio.wait([tasks[0], tasks[1], tasks[2]])
    await _settle()
    assert served in ([0, 3], [0, 2, 3], [0, 3, 4])
    for event in leave:
        event.set()
    await asyncio.wait(tasks)
    assert served[-2:] == [3, 4]


async def test_no_slot_is_lost_however_starts_are_cancelled() -> None:
    ramp = Ramp(cores=2)

    async def start() -> None:
        async with ramp.start():
            await asyncio.sleep(0)

    for pause in range(20):
        tasks = [asyncio.create_task(start()) for _ in range(10)]
        for _ in range(pause % 7):
            await asyncio.sleep(0)
        for task in tasks[:: 1 + pause % 3]:
            task.cancel()
        await asyncio.wait(tasks)
    async with asyncio.TaskGroup() as last:
        for _ in range(10):
            last.create_task(start())
