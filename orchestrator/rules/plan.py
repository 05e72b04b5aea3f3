"""One task × group size → rollout plans. Pure: equal arguments give equal plans."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from orchestrator.types import (
    MIN_MEMORY_BYTES,
    STORAGE_INODES,
    AgentSpec,
    Limits,
    RolloutPlan,
    Sampling,
    SandboxSpec,
    Split,
    Task,
)

_SEED_BITS = 31  # every inference server takes such a seed; derived seeds have one bit less (see `derive_seed`)

# Limits that a task may set for itself, lower or higher: the flag's name → the field, and what it holds.
_OF_AGENT = {"max_steps": ("max_steps", int), "step_timeout": ("step_timeout_s", float)}
_OF_LIMITS = {
    "rollout_timeout": ("rollout_timeout_s", float),
    "rollout_deadline": ("deadline_s", float),
    "max_token_length": ("max_token_length", int),
}
T = TypeVar("T", AgentSpec, Limits)


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
    """First attempts of a group. `sandbox`: the task's. `number`: place of the task in the stream; `epoch`: how
    often it came before.

    `limits` gives the run's limits for an agent, `sampling` the sampling for limits: so both follow from the
    task's own limits where it has any.
    """
    own_agent = _with_own(agent, task, _OF_AGENT)
    all_steps = replace(own_agent, max_steps=own_agent.max_steps * max(1, len(task.steps)))  # each has as many
    own_limits = _with_own(limits(all_steps), task, _OF_LIMITS)
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
            sandbox=sandbox,
            limits=own_limits,
            split=split,
            group_size=group_size,
        )
        for index in range(group_size)
    )


def sandbox_of(task: Task, usual: SandboxSpec, storage_bytes: int) -> SandboxSpec:
    """The sandbox for rollouts of this task; `usual`: for tasks that ask for nothing of their own.
    `storage_bytes`: what a writable root holds.

    CPUs and memory are the task's, more or less than usual. What it may write is no more than usual, which is the
    operator's word on memory or disk, and lies where it usually does.
    """
    own = task.workspace or task.grader or task.services
    root = "writable" if own else task.root or usual.root
    memory = max(task.memory_bytes, MIN_MEMORY_BYTES) if task.memory_bytes else usual.memory_bytes
    storage = min(task.storage_bytes or storage_bytes, storage_bytes)
    if storage_bytes <= usual.memory_bytes:
        storage = min(storage, memory)
    return replace(
        usual,
        image=task.image or usual.image,
        memory_bytes=memory,
        cpus=task.cpus or usual.cpus,
        root=root,
        storage_bytes=storage if root == "writable" else 0,
        storage_inodes=STORAGE_INODES if root == "writable" else 0,
        layers=tuple(layer for layer in (task.hosts, task.workspace) if layer),
        user=task.user,
    )


def next_attempt(plan: RolloutPlan) -> RolloutPlan:
    """The plan of a retry after a failure that is not the policy's: same seed, next attempt number."""
    attempt = plan.attempt + 1
    return replace(plan, attempt=attempt, rollout_id=rollout_id(plan.group, plan.index, attempt))


def backfill(plan: RolloutPlan, seed: int, epoch: int) -> RolloutPlan:
    """The plan of another rollout in the place of a lost one, from its begin on: next attempt number, a new
    seed."""
    following = next_attempt(plan)
    fresh = derive_seed(seed, plan.task.task_id, epoch, plan.index, following.attempt)
    return replace(following, sampling=replace(plan.sampling, seed=fresh), prefix=None)


def rollout_id(group: int, index: int, attempt: int) -> str:
    """Unique in a run: group number, place in the group, attempt."""
    return f"g{group:06d}-r{index:02d}-a{attempt}"


def derive_seed(seed: int, task_id: str, epoch: int, index: int, attempt: int) -> int:
    """hash(seed, task, epoch, index, attempt) in 30 bits: the sequence number of a completion is added to it, and
    the sum must fit into 31."""
    text = f"{seed}\0{task_id}\0{epoch}\0{index}\0{attempt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - _SEED_BITS + 1)


def seed_again(seed: int, again: int) -> int:
    """The seed in the place of a run's, for a task that came `again` times before in the same round."""
    return derive_seed(seed, "again", 0, 0, again) if again else seed


def server_of(rollout_id: str, weights: Sequence[float]) -> int:
    """Index of the server that samples for this rollout, out of as many as there are weights."""
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
    point = int.from_bytes(digest) / 2**64 * sum(weights)
    for index, weight in enumerate(weights):
        if point < weight:
            return index
        point -= weight
    return len(weights) - 1


def _with_own(spec: T, task: Task, own: Mapping[str, tuple[str, type]]) -> T:
    """`spec` with the task's own limits in place of the run's."""
    values = {field: kind(task.limits[name]) for name, (field, kind) in own.items() if name in task.limits}
    return replace(spec, **values)
