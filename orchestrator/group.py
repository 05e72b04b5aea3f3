"""One task: plan → execute → score → Group; and the (pure) policy for members that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.executor import Executor
from orchestrator.types import Attempt, Failed, FailedName, Group, Member, RolloutPlan, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """What happens to a group with members that broke for good.

    `backfill`: their places are filled by new rollouts, at most group_size of them, then the group is
    dropped. `drop`: it is dropped. `partial`: it is kept with at least `at_least` members.
    """

    kind: Literal["backfill", "drop", "partial"]
    at_least: int = 0

    @classmethod
    def parse(cls, text: str) -> GroupPolicy:
        """From `backfill`, `drop` or `partial:K`. Raises ValueError."""
        name, _, number = text.partition(":")
        if name == "partial" and number.isdecimal() and int(number) >= 1:
            return cls("partial", int(number))
        if text == "backfill":
            return cls("backfill")
        if text == "drop":
            return cls("drop")
        raise ValueError(f"{text!r}; valid are backfill, drop, partial:K with K of at least 1")


async def run_group(
    task: Task,
    plans: Sequence[RolloutPlan],
    executor: Executor,
    policy: GroupPolicy,
    refill: Callable[[RolloutPlan], RolloutPlan],
) -> Group:
    """Runs all members at once. Raises only what stops the run; siblings are cancelled with it."""
    members: dict[int, Member] = {}
    attempts: list[Attempt] = []
    pending = list(plans)
    refills = len(plans) if policy.kind == "backfill" else 0
    while pending:
        async with asyncio.TaskGroup() as tg:
            runs = [tg.create_task(executor.execute(plan), name=plan.rollout_id) for plan in pending]
        lost: list[Attempt] = []
        for run in runs:
            *_, last = results = run.result()
            attempts += [r.attempt if isinstance(r, Member) else r for r in results]
            if isinstance(last, Member):
                members[last.attempt.plan.index] = last
            else:
                lost.append(last)
        hopeless = any(_name(a) is FailedName.BAD_TASK for a in lost)
        pending = [] if hopeless else [refill(a.plan) for a in lost[:refills]]
        refills -= len(pending)
    complete = tuple(members[index] for index in sorted(members))
    return Group(
        number=plans[0].group,
        task=task,
        members_G=complete,
        attempts=tuple(attempts),
        dropped=verdict(policy, len(plans), complete, attempts),
    )


def verdict(
    policy: GroupPolicy, group_size: int, members: Sequence[Member], attempts: Sequence[Attempt]
) -> str | None:
    """Why the group is no training data, or None."""
    enough = policy.at_least if policy.kind == "partial" else group_size
    if len(members) >= enough:
        return None
    failures = [_name(a) for a in attempts if isinstance(a.outcome, Failed)]
    commonest = max(set(failures), key=failures.count, default=None)
    return f"{len(members)} of {group_size} rollouts usable" + (f", mostly {commonest}" if commonest else "")


def _name(attempt: Attempt) -> FailedName | None:
    return attempt.outcome.name if isinstance(attempt.outcome, Failed) else None
