"""No slot is idle while a rollout of any open group could run; groups end in about the order they were begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.engine.group import Unfinished
from orchestrator.engine.groups import READY_GROUPS, open_groups
from orchestrator.host.local import LocalHost
from orchestrator.host.slots import Line
from orchestrator.rules.observer import Listener, Observer
from orchestrator.scorers.grader import GraderScorer
from orchestrator.types import Attempt, Ended, Grader, Group, Member, Record, RolloutPlan, Score, Task
from tests.fakes.held_rollouts import Held, held, some_tasks, unchanged, until

# ---------------------------------------------------------------- slots


class OneSlot:
    """A line for one slot."""

    def __init__(self) -> None:
        self.free = [self]
        self.line: Line[None, OneSlot] = Line(lambda _: self.free.pop() if self.free else None, OneSlot.release)

    async def acquire(self, turn: int) -> None:
        await self.line.wait(turn, None)

    def release(self) -> None:
        self.free.append(self)
        self.line.serve()


async def test_the_lowest_turn_is_next_and_within_a_turn_who_came_first() -> None:
    slots, order = OneSlot(), []
    first, second = slots.line.turn(), slots.line.turn()
    await slots.acquire(first)

    async def one(name: str, turn: int) -> None:
        await slots.acquire(turn)
        order.append(name)
        slots.release()

    tasks = []
    for name, turn in (("late", second), ("early", first), ("early again", first)):
        tasks.append(asyncio.create_task(one(name, turn)))
        await asyncio.sleep(0)
    slots.release()
    await asyncio.gather(*tasks)
    assert order == ["early", "early again", "late"]


async def test_a_slot_given_to_someone_who_is_cancelled_in_that_moment_is_not_lost() -> None:
    slots = OneSlot()
    await slots.acquire(0)
    given = asyncio.create_task(slots.acquire(1))
    waiting = asyncio.create_task(slots.acquire(2))
    gone = asyncio.create_task(slots.acquire(0))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    slots.release()
    given.cancel()
    async with asyncio.timeout(60):
        await waiting
    assert given.cancelled()
    slots.release()
    async with asyncio.timeout(60):
        await slots.acquire(3)


# ---------------------------------------------------------------- the engine


@asynccontextmanager
async def groups_of(engine: Held, tasks: Iterator[Task]) -> AsyncIterator[list[Group]]:
    """The groups as they come, taken at once."""
    taken: list[Group] = []

    async def take() -> None:
        async with aclosing(engine.orchestrator.groups(tasks)) as groups:
            async for group in groups:
                taken.append(group)

    task = asyncio.create_task(take())
    try:
        yield taken
        engine.completer.let_all_go()
        async with asyncio.timeout(60):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_free_slot_goes_to_the_next_group_while_stragglers_run() -> None:
    async with held(max_concurrent_sandboxes=4) as engine, groups_of(engine, some_tasks(5)) as taken:
        await engine.runs("g0-r0-a0", "g0-r1-a0", "g1-r0-a0", "g1-r1-a0")
        engine.completer.let_go("g0-r1-a0", "g1-r1-a0")
        await engine.runs("g0-r0-a0", "g1-r0-a0", "g2-r0-a0", "g2-r1-a0")
        engine.completer.let_go("g2-r1-a0")
        await engine.runs("g0-r0-a0", "g1-r0-a0", "g2-r0-a0", "g3-r0-a0")
        engine.completer.let_go("g2-r0-a0")
        await engine.runs("g0-r0-a0", "g1-r0-a0", "g3-r0-a0", "g3-r1-a0")
        await until(lambda: [group.number for group in taken] == [2])
    assert sorted(group.number for group in taken) == list(range(5))
    assert engine.launcher.most_at_once == 4


async def test_with_the_default_every_slot_may_be_held_by_another_group() -> None:
    async with held(max_concurrent_sandboxes=3) as engine, groups_of(engine, some_tasks(9)) as taken:
        engine.completer.let_all_go(lambda rollout: rollout.split("-")[1] == "r1")
        await engine.runs("g0-r0-a0", "g1-r0-a0", "g2-r0-a0")
        assert taken == []


async def test_no_more_groups_are_open_than_the_setting_says() -> None:
    async with (
        held(max_concurrent_sandboxes=4, max_open_groups=2) as engine,
        groups_of(engine, some_tasks(6)) as taken,
    ):
        await engine.runs("g0-r0-a0", "g0-r1-a0", "g1-r0-a0", "g1-r1-a0")
        engine.completer.let_go("g0-r0-a0", "g1-r0-a0")
        await engine.runs("g0-r1-a0", "g1-r1-a0")
        await unchanged(lambda: engine.running)
        engine.completer.let_go("g0-r1-a0")
        await engine.runs("g1-r1-a0", "g2-r0-a0", "g2-r1-a0")
    assert len(taken) == 6


async def test_refills_begin_at_once_and_before_rollouts_of_later_groups() -> None:
    async with (
        held(max_concurrent_sandboxes=3, group_size=3, max_retries=0) as engine,
        groups_of(engine, some_tasks(3)) as taken,
    ):
        engine.completer.dead = lambda group, index, attempt: group == index == attempt == 0
        await engine.runs("g0-r0-a0", "g0-r1-a0", "g0-r2-a0")
        engine.completer.let_go("g0-r0-a0")
        # Its slot is somebody else's already, and its refill is the first in the line.
        await engine.runs("g0-r1-a0", "g0-r2-a0", "g1-r0-a0")
        hosts = engine.orchestrator.hosts
        assert isinstance(hosts, LocalHost)
        await until(lambda: hosts._line._waiting[0][0] == 0)
        engine.completer.let_go("g1-r0-a0")
        await engine.runs("g0-r0-a1", "g0-r1-a0", "g0-r2-a0")
    assert [len(group.members_G) for group in taken] == [3, 3, 3]


def graded_tasks(count: int) -> Iterator[Task]:
    for task in some_tasks(count):
        yield replace(task, grader=Grader("command", command=("true",)))


async def test_what_is_graded_has_room_of_its_own_and_gives_the_rollouts_slot_back() -> None:
    async with (
        held(
            scorer=GraderScorer(),
            launcher="oci",
            scoring_strategy="grader",
            max_concurrent_sandboxes=1,
            grading_sandboxes=1,
        ) as engine,
        groups_of(engine, graded_tasks(2)) as taken,
    ):
        await engine.runs("g0-r0-a0")
        engine.completer.let_go("g0-r0-a0")
        await until(lambda: engine.launcher.commanding == 1)
        await engine.runs("g0-r1-a0")  # while the first is graded
        engine.completer.let_go("g0-r1-a0")
        await engine.runs()
        await unchanged(lambda: (engine.running, engine.launcher.commanding))  # there is no room to grade it
        engine.launcher.commands.release()
        await engine.runs("g1-r0-a0")
        for _ in range(3):
            engine.launcher.commands.release()
    assert [member.score.value for group in taken for member in group.members_G] == [1.0] * 4
    assert engine.launcher.commanding == 0


async def test_without_room_of_its_own_it_is_graded_in_the_rollouts_slot() -> None:
    async with (
        held(scorer=GraderScorer(), launcher="oci", max_concurrent_sandboxes=1, grading_sandboxes=0) as engine,
        groups_of(engine, graded_tasks(1)) as taken,
    ):
        await engine.runs("g0-r0-a0")
        engine.completer.let_go("g0-r0-a0")
        await until(lambda: engine.launcher.commanding == 1)
        await unchanged(lambda: engine.running)
        engine.launcher.commands.release()
        await engine.runs("g0-r1-a0")
        engine.launcher.commands.release()
    assert [member.score.value for member in taken[0].members_G] == [1.0] * 2


class HeldScorer:
    """Scores when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        self.asked += 1
        await self.go.wait()
        return Score(1.0, {"correctness": 1.0})


async def test_a_rollout_that_is_being_graded_holds_no_slot_back() -> None:
    scorer = HeldScorer()
    async with held(scorer=scorer) as engine, groups_of(engine, some_tasks(4)) as taken:
        await engine.runs("g0-r0-a0", "g0-r1-a0")
        engine.completer.let_go("g0-r0-a0", "g0-r1-a0")
        await engine.runs("g1-r0-a0", "g1-r1-a0")
        await until(lambda: scorer.asked == 2)
        assert taken == []
        scorer.go.set()


@pytest.mark.slow
async def test_tasks_are_read_when_they_are_needed() -> None:
    read: list[str] = []

    def tasks() -> Iterator[Task]:
        for task in some_tasks(50):
            read.append(task.task_id)
            yield task

    async with held() as engine, groups_of(engine, tasks()) as taken:
        await engine.runs("g0-r0-a0", "g0-r1-a0")
        await unchanged(lambda: len(read))
        assert len(read) <= 3, "one group runs, one waits, one task is at hand"
        engine.completer.let_go("g0-r0-a0")
        await engine.runs("g0-r1-a0", "g1-r0-a0")
        await unchanged(lambda: len(read))
        assert len(read) <= 3
    assert len(taken) == 50


async def test_groups_that_nobody_takes_hold_the_sandboxes_back() -> None:
    async with held() as engine:
        engine.completer.let_all_go()
        async with aclosing(engine.orchestrator.groups(some_tasks(100))) as groups:
            await anext(groups)
            most = 2 * (
                1
                + READY_GROUPS
                + open_groups(engine.orchestrator.config.env, engine.orchestrator.maker.hosts.capacity)
            )
            await until(lambda: len(engine.completer.asked) == most)
            await unchanged(lambda: len(engine.completer.asked))


async def test_a_drained_run_begins_nothing_and_lets_the_rest_end() -> None:
    async with held() as engine, groups_of(engine, some_tasks(9)) as taken:
        await engine.runs("g0-r0-a0", "g0-r1-a0")
        engine.completer.let_go("g0-r0-a0")
        await engine.runs("g0-r1-a0", "g1-r0-a0")
        engine.orchestrator.drain()
    assert [group.number for group in taken] == [0]
    assert sorted(engine.completer.asked) == ["g0-r0-a0", "g0-r1-a0", "g1-r0-a0"]


async def test_a_run_left_early_removes_what_runs_in_all_open_groups() -> None:
    recorded: list[Member | Attempt] = []

    class Heard(Listener):
        def attempt(self, result: Member | Attempt) -> None:
            recorded.append(result)

    async with held(Observer(listeners=[Heard()])) as engine:
        engine.completer.let_all_go(lambda rollout: rollout in ("g0-r0-a0", "g1-r0-a0", "g1-r1-a0"))
        async with aclosing(engine.orchestrator.groups(some_tasks(9))) as groups:
            assert (await anext(groups)).number == 1
            await engine.runs("g0-r1-a0", "g2-r0-a0")
    assert len(recorded) == 5
    assert engine.launcher.live == {}


async def test_an_evaluation_beside_shares_the_slots_and_keeps_to_its_tasks() -> None:
    async with held(max_concurrent_sandboxes=3, max_eval_workers=1) as engine:
        config = engine.orchestrator.config
        beside = engine.orchestrator.beside(
            replace(config, env=config.env.for_evaluation()), Observer(), split="eval"
        )
        assert beside.hosts is engine.orchestrator.hosts
        async with (
            groups_of(engine, some_tasks(4)) as taken,
            groups_of(Held(beside, engine.completer, engine.launcher), some_tasks(4)) as measured,
        ):
            await until(lambda: len(engine.running) == 3)
    assert (len(taken), len(measured)) == (4, 4)
    assert engine.launcher.most_at_once == 3


async def test_a_caller_bounds_what_a_task_may_ask_for() -> None:
    class Seen:
        def __init__(self) -> None:
            self.plans: list[RolloutPlan] = []

        async def execute(self, plan: RolloutPlan) -> None:
            self.plans.append(plan)

    task = Task("long", "?", limits={"max_token_length": 50_000, "rollout_deadline": 9_000.0})
    async with held() as engine:
        seen: Any = Seen()
        with pytest.raises(Unfinished):
            await engine.orchestrator.maker.make(task, 0, 0, seen, longest_s=600.0, longest_tokens=4_095)
    assert {(plan.limits.max_token_length, plan.limits.deadline_s) for plan in seen.plans} == {(4_095, 600.0)}
