"""Launching pauses for what is away, and a run that leads nowhere ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orchestrator.engine.health import AgentGate, HealthGate
from orchestrator.errors import (
    AgentUnusable,
    AuthenticationError,
    DockerError,
    EngineUnfitError,
    LaunchError,
    RunUnhealthy,
)
from orchestrator.host.breaker import LOOKS, Breaker
from orchestrator.rules.backoff import Backoff
from orchestrator.types import Attempt, Failed, FailedName, Group
from tests.fakes.plans import a_plan, a_record, an_attempt


class Thing:
    """Something that can go away."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked = 0
        self.said: list[str] = []

    async def ask(self) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    def breaker(self, patience_s: float = 60.0) -> Breaker:
        return Breaker(
            "the thing", self.ask, self.said.append, backoff=Backoff(0.001, 0.001), patience_s=patience_s
        )


async def test_failure_while_the_thing_answers_pauses_nothing() -> None:
    thing = Thing()
    breaker = thing.breaker()
    assert not await breaker.away()
    async with asyncio.timeout(60.0):
        await breaker.passed()
    assert thing.said == []


async def test_launching_pauses_once_for_all_and_resumes_by_itself() -> None:
    thing = Thing()
    breaker = thing.breaker()
    thing.error = DockerError("no answer")
    assert all(await asyncio.gather(*(breaker.away() for _ in range(8))))
    waiting = [asyncio.create_task(breaker.passed()) for _ in range(8)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    assert len(thing.said) == 1
    assert "the thing is away, launching pauses: no answer" in thing.said
    thing.error = None
    async with asyncio.timeout(60.0):
        await asyncio.gather(*waiting)
    assert len(thing.said) == 2
    assert "is back" in thing.said[1]
    assert not await breaker.away()


async def test_a_cancelled_waiter_leaves_the_asking_to_the_next() -> None:
    thing = Thing()
    breaker = thing.breaker()
    thing.error = DockerError("no answer")
    assert await breaker.away()
    first, second = asyncio.create_task(breaker.passed()), asyncio.create_task(breaker.passed())
    await asyncio.sleep(0.01)
    first.cancel()
    thing.error = None
    async with asyncio.timeout(60.0):
        await second


async def test_patience_has_an_end() -> None:
    thing = Thing()
    breaker = thing.breaker(patience_s=0.02)
    thing.error = DockerError("no answer")
    assert await breaker.away()
    with pytest.raises(RunUnhealthy, match="the thing has been away"):
        async with asyncio.timeout(60.0):
            await breaker.passed()


async def test_refused_key_is_no_absence() -> None:
    thing = Thing()
    thing.error = AuthenticationError("the key is refused")
    with pytest.raises(AuthenticationError):
        await thing.breaker().away()


LLM = Failed(FailedName.LLM_ERROR, "HTTP 500")
DOCKER = Failed(FailedName.DOCKER_ERROR, "no answer")


def test_health_gate_names_the_commonest_cause() -> None:
    gate = HealthGate(window=8, least=6, groups=3)
    for group, failure in enumerate((DOCKER, LLM, LLM, LLM, None)):
        gate.count(group, failure)
    with pytest.raises(RunUnhealthy, match=r"5 of the last 6 rollouts broke, 4 of them by llm_error.*HTTP 500"):
        gate.count(5, LLM)


def test_health_gate_forgets_what_is_long_ago_and_bears_a_third() -> None:
    gate = HealthGate(window=9, least=3, groups=1)
    for group in range(50):
        for failure in (LLM, None, None):
            gate.count(group, failure)


def test_two_hopeless_tasks_are_no_sick_run() -> None:
    gate = HealthGate(window=32, least=4, groups=3)
    for _ in range(100):
        gate.count(0, LLM)
        gate.count(1, LLM)
    with pytest.raises(RunUnhealthy):
        gate.count(2, LLM)


def test_bad_tasks_and_cancelled_rollouts_are_no_sickness() -> None:
    gate = HealthGate(window=4, least=2, groups=1)
    for group in range(20):
        gate.count(group, Failed(FailedName.BAD_TASK, "torn"))
        gate.count(group, Failed(FailedName.CANCELLED, "stopped"))


def test_ten_dead_tasks_in_a_row_end_no_run_and_a_dozen_do() -> None:
    gate = HealthGate(window=2 * 8 * 12)
    for group in range(11):
        for _ in range(9):
            gate.count(group, LLM)
    with pytest.raises(RunUnhealthy, match="in 12 groups"):
        gate.count(11, LLM)


def test_dead_tasks_among_good_ones_end_no_run() -> None:
    gate = HealthGate(window=2 * 8 * 12)
    for group in range(200):
        for _ in range(8):
            gate.count(group, LLM if group % 2 else None)


def test_what_was_known_to_break_tells_nothing_new() -> None:
    gate = HealthGate(window=8, least=2, groups=2)
    for group in range(50):
        gate.broke_before(group, LLM)
        gate.count(group, LLM)
    gate.count(50, LLM)
    with pytest.raises(RunUnhealthy):
        gate.count(51, LLM)


async def test_what_answers_that_it_cannot_is_not_called_away() -> None:
    thing = Thing()
    breaker = thing.breaker()
    thing.error = LaunchError("no space left")
    assert await breaker.away()
    thing.error = None
    async with asyncio.timeout(60.0):
        await breaker.passed()
    assert "the thing makes no sandboxes, launching pauses: no space left" in thing.said
    assert "the thing makes sandboxes again after 0 s, rollouts go on" in thing.said
    thing.error = LaunchError("no space left")
    impatient = thing.breaker(patience_s=0.0)
    assert await impatient.away()
    with pytest.raises(RunUnhealthy, match="the thing has made no sandbox for 0 s: no space left"):
        async with asyncio.timeout(60.0):
            await impatient.passed()


async def test_what_no_waiting_ends_is_not_waited_for() -> None:
    thing = Thing()
    breaker = thing.breaker(patience_s=1e9)
    thing.error = EngineUnfitError("its storage fails")
    assert await breaker.away()
    with pytest.raises(RunUnhealthy, match="waiting does not help: its storage fails"):
        async with asyncio.timeout(60.0):
            await breaker.passed()
    assert thing.asked <= 1 + LOOKS


AGENT = Failed(FailedName.AGENT_ERROR, "no completion: exit code 1\nTraceback\n  1 / 0")


class Told:
    """A gate, what it said, and groups that end."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.gate = AgentGate(self.said.append)

    def group(self, *failures: Failed, dropped: str | None = "0 usable", turns: int = 0) -> None:
        attempts = tuple(Attempt(a_plan(n), a_record(turns), failure) for n, failure in enumerate(failures))
        for attempt in attempts:
            self.gate.attempt(attempt)
        self.gate.group(Group(0, a_plan().task, (), attempts, dropped))


def test_the_first_program_without_a_completion_is_told_with_its_last_words_and_no_other() -> None:
    told = Told()
    told.gate.attempt(replace(an_attempt(LLM), record=a_record(0)))
    assert told.said == []
    told.group(AGENT, AGENT)
    assert told.said == ["agent_error, the first: no completion: exit code 1", "  | Traceback", "  |   1 / 0"]


def test_three_groups_in_a_row_without_a_completion_end_the_run_and_then_it_counts_anew() -> None:
    told = Told()
    for _ in range(2):
        told.group(AGENT, LLM)  # not every rollout comes so far
        told.group(AGENT)
        with pytest.raises(AgentUnusable, match=r"no rollout of 3 groups in a row .* no completion: exit code 1$"):
            told.group(AGENT, AGENT)


def test_a_completion_of_any_rollout_begins_the_count_anew() -> None:
    told = Told()
    for _ in range(9):
        told.group(AGENT)
        told.group(AGENT)
        told.gate.attempt(an_attempt())  # of a group that is still open


def test_groups_that_are_lost_otherwise_neither_count_nor_excuse() -> None:
    told = Told()
    for _ in range(9):
        told.group(DOCKER)
    told.group(AGENT)
    told.group(DOCKER)
    told.group(AGENT)
    told.group(AGENT, LLM, turns=1)
    told.group(AGENT)
    told.group(AGENT)
    with pytest.raises(AgentUnusable):
        told.group(AGENT)
