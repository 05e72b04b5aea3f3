"""A task's own limits, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.rules.plan import plan_group
from orchestrator.settings.sources import load_config
from orchestrator.types import RolloutPlan, Task


def planned(limits: Mapping[str, float], *flags: str) -> RolloutPlan:
    config = load_config(list(flags), environ={})
    [plan] = plan_group(
        Task("own", "What is 6 times 7?", "42", limits=limits),
        number=0,
        group_size=1,
        epoch=0,
        seed=0,
        sampling=config.sampling,
        agent=config.agent_spec(),
        sandbox=config.sandbox_spec(),
        limits=config.limits,
    )
    return plan


@pytest.mark.parametrize("steps", [1, 100])
def test_a_task_that_sets_its_steps_gets_completions_for_them(steps: int) -> None:
    plan = planned({"max_steps": steps}, "--env.max_steps", "12")
    assert (plan.agent.max_steps, plan.limits.completions) == (steps, 4 * steps + 16)


def test_a_number_of_completions_that_the_run_sets_holds_for_every_task() -> None:
    assert planned({"max_steps": 100}, "--env.max_completions", "7").limits.completions == 7


@pytest.mark.parametrize(("own", "sampled"), [(200, 200), (8_000, 4_000)])
def test_a_task_with_a_line_of_its_own_gets_completions_that_long(own: int, sampled: int) -> None:
    plan = planned(
        {"max_token_length": own}, "--env.max_token_length", "500", "--env.max_completion_tokens", "4000"
    )
    assert (plan.limits.max_token_length, plan.sampling.max_tokens) == (own, sampled)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("task", "flags", "expected"),
    [
        ({}, [], (1.0, GIB, GIB // 2)),
        ({"cpus": 4.0, "memory_bytes": 8 * GIB}, [], (4.0, 8 * GIB, GIB // 2)),
        ({"cpus": 0.5, "memory_bytes": 100}, [], (0.5, GIB // 4, GIB // 4)),
        ({"storage_bytes": 10 * GIB, "memory_bytes": 2 * GIB}, [], (1.0, 2 * GIB, GIB // 2)),
        ({"storage_bytes": GIB // 8}, [], (1.0, GIB, GIB // 8)),
        ({"storage_bytes": 10 * GIB}, ["--env.sandbox_storage", "4GiB"], (1.0, GIB, 4 * GIB)),
    ],
)
def test_a_task_s_sandbox_has_what_it_asks_for_and_writes_no_more_than_the_operator_allows(
    task: dict[str, Any], flags: list[str], expected: tuple[float, int, int]
) -> None:
    """And it writes where the run's sandboxes do: to the disk only if these do."""
    spec = load_config(flags, environ={}).sandbox_spec(Task("t", "?", root="writable", **task))
    assert (spec.cpus, spec.memory_bytes, spec.storage_bytes) == expected
    assert spec.is_on_disk == bool(flags)


def test_a_task_without_limits_has_the_run_s() -> None:
    config = load_config(["--env.max_steps", "5"], environ={})
    plan = planned({}, "--env.max_steps", "5")
    assert (plan.agent, plan.limits) == (config.agent_spec(), config.limits())
