"""No two rollouts of an orchestrator share an id or a seed, however often it is called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from orchestrator.engine.draws import Draws
from orchestrator.errors import ConfigError
from orchestrator.rules.observer import Listener, Observer
from orchestrator.tasks.base import Source
from orchestrator.types import BadTask, Member, RolloutPlan, Task
from tests.fakes.held_rollouts import held, some_tasks, until
from tests.fakes.runs import DEADLINE_S

A, B = Task("a", "What is 6 times 7?", "42"), Task("b", "What is 6 times 7?", "43")
BAD = BadTask("c", "torn")


class Plans(Listener):
    """Every plan that was begun."""

    def __init__(self) -> None:
        self.all: list[RolloutPlan] = []

    def begun(self, plan: RolloutPlan, node: str) -> None:
        self.all.append(plan)

    @property
    def seeds(self) -> list[int]:
        return [plan.sampling.seed for plan in self.all]


def plans_of(*listeners: Listener) -> Observer:
    return Observer(listeners=list(listeners))


# ---------------------------------------------------------------- the draws


def test_numbers_and_epochs_go_on_from_call_to_call() -> None:
    draws = Draws(lambda task: task)
    first = list(draws.once([A, BAD, B], epoch=None, size=None))
    second = list(draws.several([A, BAD], 3, epoch=None, rounds=True))
    third = list(draws.once([A], epoch=None, size=4))
    assert [(d.task, d.number, d.epoch) for d in first] == [(A, 0, 0), (BAD, 1, 0), (B, 2, 0)]
    assert [(d.task, d.number, d.epoch) for d in second] == [(A, 3, 1), (BAD, 4, 1), (A, 5, 2), (A, 6, 3)]
    assert [(d.number, d.epoch, d.size) for d in third] == [(7, 4, 4)]


def test_an_epoch_may_be_named_and_is_counted_on_from() -> None:
    draws = Draws(lambda task: task)
    epochs = [next(draws.once([A], epoch=epoch, size=None)).epoch for epoch in (None, 7, 3, None, 7)]
    assert epochs == [0, 7, 3, 8, 7]


@pytest.mark.parametrize("tasks", [[A, B, A], Source("two", lambda: iter([A, B]))], ids=["a list", "a source"])
def test_rounds_of_a_named_epoch_are_not_the_next_epoch_s(tasks: list[Task]) -> None:
    draws = Draws(lambda task: task)
    drawn = [draw for epoch in (0, 1, 2) for draw in draws.several(tasks, 7, epoch=epoch, rounds=True)]
    assert [draw.epoch for draw in drawn] == [0] * 7 + [1] * 7 + [2] * 7
    assert len({(draw.task.task_id, draw.epoch, draw.again) for draw in drawn}) == len(drawn)


def test_an_epoch_has_one_way_to_be_written() -> None:
    draws = Draws(lambda task: task)

    class Step:
        def __index__(self) -> int:
            return 7

        def __str__(self) -> str:
            return "step 7"

    assert repr(next(draws.once([A], epoch=Step(), size=None)).epoch) == "7"  # type: ignore[arg-type]
    for odd in (1.0, "7", float("nan")):
        with pytest.raises(TypeError):
            next(draws.once([A], epoch=odd, size=None))  # type: ignore[arg-type]


def test_a_task_that_comes_twice_in_a_call_is_told_apart() -> None:
    draws = Draws(lambda task: task)
    assert [d.again for d in draws.once([A, B, A, A], epoch=None, size=None)] == [0, 0, 1, 2]
    source = Source("twice", lambda: iter([A, A]))
    assert [type(d.task) for d in draws.once(source, epoch=None, size=None)] == [Task, BadTask]


def test_there_are_no_rounds_of_bad_tasks_alone() -> None:
    draws = Draws(lambda task: task)
    assert [d.task for d in draws.several([BAD], 5, epoch=None, rounds=True)] == [BAD]
    assert [d.task for d in draws.several([A, B], 5, epoch=None, rounds=False)] == [A, B]
    assert [d.task for d in draws.several([A, B], 1, epoch=None, rounds=False)] == [A]


# ---------------------------------------------------------------- the engine


async def test_repeated_calls_repeat_no_id_and_no_seed() -> None:
    plans = Plans()
    async with held(plans_of(plans)) as engine:
        engine.completer.let_all_go()
        for _ in range(2):
            await engine.orchestrator.rollouts([A, B, A])
            async with aclosing(engine.orchestrator.groups([A, A])) as groups:
                assert len([group async for group in groups]) == 2
    assert len(plans.all) == 20
    assert len({plan.rollout_id for plan in plans.all}) == len(set(plans.seeds)) == 20


async def test_calls_at_the_same_time_repeat_none_either() -> None:
    plans = Plans()
    async with held(plans_of(plans)) as engine:
        engine.completer.let_all_go()
        both = await asyncio.gather(*(engine.orchestrator.rollouts([A, B]) for _ in range(2)))
    assert [[row.task_id for row in rows] for rows in both] == [["a", "a", "b", "b"]] * 2
    assert len({row.rollout_id for rows in both for row in rows}) == len(set(plans.seeds)) == 8


async def test_a_named_epoch_gives_the_same_seeds_again() -> None:
    seeds = []
    for epochs in ((0, 5), (5,)):
        plans = Plans()
        async with held(plans_of(plans)) as engine:
            engine.completer.let_all_go()
            for epoch in epochs:
                await engine.orchestrator.rollouts([A, A], epoch=epoch)
        seeds.append(sorted(plans.seeds[-4:]))
    assert seeds[0] == seeds[1]


async def test_rows_come_in_the_order_of_the_tasks_whatever_became_of_them() -> None:
    async with held(group_policy="drop", max_retries=0, max_concurrent_sandboxes=6) as engine:
        engine.completer.dead = lambda group, index, attempt: (group, index) == (2, 1)
        call = asyncio.create_task(engine.orchestrator.rollouts([A, BAD, B, A]))
        await until(lambda: len(engine.running) == 6)
        engine.completer.let_go("g3-r0-a0", "g3-r1-a0", "g2-r0-a0", "g2-r1-a0")
        await until(lambda: len(engine.running) == 2)
        engine.completer.let_all_go()
        rows = await call
    assert [(row.task_id, row.index, row.outcome, row.score) for row in rows] == [
        ("a", 0, "finished", 1.0),
        ("a", 1, "finished", 1.0),
        ("c", 0, "bad_task", None),
        ("c", 1, "bad_task", None),
        ("b", 0, "finished", 0.0),
        ("b", 1, "llm_error", None),
        ("a", 0, "finished", 1.0),
        ("a", 1, "finished", 1.0),
    ]
    dropped = [row.dropped for row in rows]
    assert dropped[:4] == dropped[6:] + [None] * 2 == [None] * 4
    assert all("1 of 2 rollouts usable, mostly llm_error" in str(why) for why in dropped[4:6])


async def test_what_a_drain_leaves_unfinished_is_told() -> None:
    async with held() as engine:
        call = asyncio.create_task(engine.orchestrator.rollouts([A, B, A]))
        await until(lambda: len(engine.running) == 2)
        engine.orchestrator.drain()
        engine.completer.let_all_go()
        rows = await call
    assert [(row.task_id, row.outcome) for row in rows] == [
        ("a", "finished"),
        ("a", "finished"),
        *[("b", "cancelled")] * 2,
        *[("a", "cancelled")] * 2,
    ]
    assert {row.reason for row in rows[2:]} == {"the run was stopped before the group ended"}


async def test_the_size_of_groups_may_differ_from_call_to_call() -> None:
    async with held() as engine:
        engine.completer.let_all_go()
        rows = await engine.orchestrator.rollouts([A, B], group_size=3)
        assert [(row.task_id, row.index) for row in rows] == [(task, n) for task in "ab" for n in range(3)]
        assert len(await engine.orchestrator.rollouts([A])) == 2


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
async def test_a_size_that_no_group_can_have_is_refused(size: Any) -> None:
    async with held() as engine:
        with pytest.raises(ConfigError, match=f"group_size: {size!r} is no whole number of at least 1"):
            await engine.orchestrator.rollouts([A], group_size=size)


async def test_tasks_that_are_slow_to_read_hold_up_no_other_call() -> None:
    read_on = threading.Event()

    def slow() -> Iterator[Task]:
        yield A
        assert read_on.wait(DEADLINE_S)
        yield B

    async with held() as engine:
        engine.completer.let_all_go()
        reading = asyncio.create_task(engine.orchestrator.rollouts(slow()))
        assert len(await engine.orchestrator.rollouts([A])) == 2
        read_on.set()
        assert len(await reading) == 4


async def test_a_number_of_groups_is_refused_where_the_caller_says_which() -> None:
    async with held(total_steps=3) as engine:
        with pytest.raises(ConfigError, match=r"env\.total_steps: .* leave it at -1"):
            await engine.orchestrator.rollouts([A])


async def test_rows_of_a_group_are_its_members() -> None:
    async with held() as engine:
        engine.completer.let_all_go()
        async with aclosing(engine.orchestrator.groups(some_tasks(1))) as groups:
            (group,) = [group async for group in groups]
        assert all(isinstance(member, Member) for member in group.members_G)
        rows = engine.orchestrator.rows(group)
    assert [row.rollout_id for row in rows] == [m.attempt.plan.rollout_id for m in group.members_G]
