"""Calls of host tools that a program makes side by side, as its lease answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.proxy.lease import TOOL_CALLS_TOGETHER, Lease
from orchestrator.proxy.numbered_calls import SequenceError
from orchestrator.tools.base import CALLER
from sandbox.runner import client
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, an_agent, some_limits


class Held:
    """A tool whose calls wait until they are let go; it notes whose they are."""

    description, output_type = "Waits.", "string"
    inputs: Mapping[str, Mapping[str, Any]] = {"n": {"type": "integer", "description": "Its number."}}

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.callers: set[str] = set()
        self.go = asyncio.Event()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        self.begun.append(arguments["n"])
        self.callers.add(CALLER.get())
        await self.go.wait()
        return str(arguments["n"])


def a_lease(tool: Held, kind: str, calls: int = 64) -> Lease:
    plan = a_plan(agent=an_agent(kind=kind), limits=some_limits(tool_calls=calls))  # type: ignore[arg-type]
    return Lease(plan, ScriptedCompleter([]), None, {"held": tool})


async def call(lease: Lease, number: int) -> str | None:
    reply = await lease.call_tool(number, str(number).encode(), "held", {"n": number})
    return reply.output if reply.ended is None else reply.ended


async def test_a_program_has_so_many_calls_at_a_time_in_any_order() -> None:
    tool = Held()
    lease = a_lease(tool, "program")
    numbers = list(reversed(range(1, TOOL_CALLS_TOGETHER + 1)))
    calls = [asyncio.create_task(call(lease, number)) for number in numbers]
    while len(tool.begun) < TOOL_CALLS_TOGETHER:
        await asyncio.sleep(0)
    with pytest.raises(SequenceError):
        await call(lease, TOOL_CALLS_TOGETHER + 1)
    tool.go.set()
    assert await asyncio.gather(*calls) == [str(number) for number in numbers]
    assert await call(lease, TOOL_CALLS_TOGETHER + 1) == str(TOOL_CALLS_TOGETHER + 1)
    assert {made.sequence for made in lease.tool_calls} == set(range(1, TOOL_CALLS_TOGETHER + 2))
    assert tool.callers == {lease.plan.rollout_id}
    await lease.aclose()


async def test_calls_under_way_count_against_the_budget() -> None:
    tool = Held()
    lease = a_lease(tool, "program", calls=2)
    calls = [asyncio.create_task(call(lease, number)) for number in (1, 2)]
    while len(tool.begun) < 2:
        await asyncio.sleep(0)
    assert await call(lease, 3) == "budget"
    tool.go.set()
    await asyncio.gather(*calls)
    await lease.aclose()


async def test_the_code_of_another_agent_makes_one_call_after_the_other() -> None:
    tool = Held()
    lease = a_lease(tool, "code")
    first = asyncio.create_task(call(lease, 1))
    while not tool.begun:
        await asyncio.sleep(0)
    with pytest.raises(SequenceError):
        await call(lease, 2)
    tool.go.set()
    await first
    await lease.aclose()


def test_both_sides_agree_on_how_many_there_are_at_a_time() -> None:
    assert client.TOOL_CALLS_TOGETHER == TOOL_CALLS_TOGETHER
