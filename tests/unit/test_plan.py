"""A task's own limits, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping

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


def test_a_task_without_limits_has_the_run_s() -> None:
    config = load_config(["--env.max_steps", "5"], environ={})
    plan = planned({}, "--env.max_steps", "5")
    assert (plan.agent, plan.limits) == (config.agent_spec(), config.limits())
