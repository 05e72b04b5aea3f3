"""One task × group size → rollout plans. Pure: equal arguments give equal plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from orchestrator.types import AgentSpec, Limits, RolloutPlan, Sampling, SandboxSpec, Split, Task

_SEED_BITS = 31  # every inference server takes such a seed; derived seeds have one bit less (see `derive_seed`)


def plan_group(
    task: Task,
    *,
    number: int,
    group_size: int,
    epoch: int,
    seed: int,
    sampling: Callable[[Limits], Sampling],
    agent: AgentSpec,
    sandbox: SandboxSpec,
    limits: Callable[[AgentSpec], Limits],
    split: Split = "train",
) -> tuple[RolloutPlan, ...]:
    """First attempts of a group. `number`: place of the task in the stream; `epoch`: how often it came before.

    `limits` gives the run's limits for an agent, `sampling` the sampling for limits: so both follow from the
    task's own limits where it has any.
    """
    own_agent = _with_task_steps(task, agent)
    own_limits = _with_task_limits(task, limits(own_agent))
    common = sampling(own_limits)
    return tuple(
        RolloutPlan(
            rollout_id=rollout_id(number, index, 0),
            task=task,
            group=number,
            index=index,
            attempt=0,
            sampling=replace(common, seed=derive_seed(seed, task.task_id, epoch, index, 0)),
            agent=own_agent,
            sandbox=replace(sandbox, image=task.image) if task.image else sandbox,
            limits=own_limits,
            split=split,
        )
        for index in range(group_size)
    )


def next_attempt(plan: RolloutPlan) -> RolloutPlan:
    """The plan of a retry after a failure that is not the policy's: same seed, next attempt number."""
    attempt = plan.attempt + 1
    return replace(plan, attempt=attempt, rollout_id=rollout_id(plan.group, plan.index, attempt))


def backfill(plan: RolloutPlan, seed: int, epoch: int) -> RolloutPlan:
    """The plan of another rollout in the place of a lost one: next attempt number, a new seed."""
    following = next_attempt(plan)
    fresh = derive_seed(seed, plan.task.task_id, epoch, plan.index, following.attempt)
    return replace(following, sampling=replace(plan.sampling, seed=fresh))


def rollout_id(group: int, index: int, attempt: int) -> str:
    """Unique in a run: group number, place in the group, attempt."""
    return f"g{group:06d}-r{index:02d}-a{attempt}"


def derive_seed(seed: int, task_id: str, epoch: int, index: int, attempt: int) -> int:
    """hash(seed, task, epoch, index, attempt) in 30 bits: the sequence number of a completion is added to it, and
    the sum must fit into 31."""
    text = f"{seed}\0{task_id}\0{epoch}\0{index}\0{attempt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - _SEED_BITS + 1)


# A task may set limits of its own, lower or higher. Their names are those of the flags.


def _with_task_steps(task: Task, agent: AgentSpec) -> AgentSpec:
    known = task.limits
    if "max_steps" in known:
        agent = replace(agent, max_steps=int(known["max_steps"]))
    if "step_timeout" in known:
        agent = replace(agent, step_timeout_s=float(known["step_timeout"]))
    return agent


def _with_task_limits(task: Task, limits: Limits) -> Limits:
    known = task.limits
    if "rollout_timeout" in known:
        limits = replace(limits, rollout_timeout_s=float(known["rollout_timeout"]))
    if "rollout_deadline" in known:
        limits = replace(limits, deadline_s=float(known["rollout_deadline"]))
    if "max_token_length" in known:
        limits = replace(limits, max_token_length=int(known["max_token_length"]))
    return limits
