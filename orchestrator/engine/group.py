"""Runs the rollouts of one task as a group, and holds the (pure) policy for groups with broken rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.engine.executor import Executor
from orchestrator.engine.trees import Branching
from orchestrator.types import Attempt, Failed, FailedName, Group, Member, RolloutPlan, Task

log = logging.getLogger(__name__)

MOST_IN_VAIN = 2  # refills of a group in which no rollout has succeeded yet
ZeroVariance = Literal["keep", "drop", "resample"]
Refill = Callable[[RolloutPlan], RolloutPlan]
_Results = tuple[Member | Attempt, ...] | None  # of one rollout; None: the run is being stopped


class Unfinished(Exception):
    """The run is being stopped before the group ended. The attempts so far are on record."""


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """What happens to a group in which rollouts broke for good, and to one whose scores are all equal.

    `backfill`: new rollouts take the places of broken ones, at most group_size of them, and at most MOST_IN_VAIN
    while no rollout of the group has succeeded; if that is not enough, the group is dropped. `drop`: it is
    dropped at once. `partial`: it is kept with at least `at_least` members.

    zero_variance: equal scores teach nothing where scores are compared within the group. `resample`: the whole
    group is drawn once more; that second draw is kept whatever its scores.
    """

    kind: Literal["backfill", "drop", "partial"]
    at_least: int = 0
    zero_variance: ZeroVariance = "keep"

    @classmethod
    def parse(cls, text: str, zero_variance: ZeroVariance = "keep") -> GroupPolicy:
        """From `backfill`, `drop` or `partial:K`. Raises ValueError."""
        name, _, number = text.partition(":")
        if name == "partial" and number.isdecimal() and int(number) >= 1:
            return cls("partial", int(number), zero_variance)
        if text == "backfill":
            return cls("backfill", zero_variance=zero_variance)
        if text == "drop":
            return cls("drop", zero_variance=zero_variance)
        raise ValueError(f"{text!r}; valid are backfill, drop, partial:K with K of at least 1")

    def enough(self, group_size: int) -> int:
        """How many members a group needs."""
        return self.at_least if self.kind == "partial" else group_size


async def run_group(
    task: Task,
    plans: Sequence[RolloutPlan],
    executor: Executor,
    policy: GroupPolicy,
    refill: Refill,
    branching: Branching | None = None,
) -> Group:
    """Runs all rollouts at once; with `branching`, each branch as soon as its trunk has ended. Raises Unfinished,
    and errors that stop the run; then all rollouts are cancelled.

    `refill` gives the plan of a new rollout for the place of another.
    """
    size = len(plans)
    draw = await _draw(plans, executor, policy, refill, branching)
    attempts = draw.attempts
    if policy.zero_variance == "resample" and draw.is_enough and same(draw.scores):
        # It begins where the first one did (`env.start_at`): a turn whose groups are all solved falls by it.
        begins = zip(draw.latest, plans, strict=True)
        again = [replace(refill(latest), prefix=plan.prefix) for latest, plan in begins]
        second = await _draw(again, executor, policy, refill, branching)
        attempts = attempts + second.attempts
        # If too many rollouts of the second draw break, the first draw is kept.
        draw = second if second.is_enough else draw
    failures = [attempt.outcome for attempt in attempts if isinstance(attempt.outcome, Failed)]
    dropped = verdict(policy, size, draw.scores, failures)
    return Group(plans[0].group, task, draw.members, attempts, dropped)


async def _draw(
    plans: Sequence[RolloutPlan],
    executor: Executor,
    policy: GroupPolicy,
    refill: Refill,
    branching: Branching | None,
) -> _Draw:
    draw = _Draw(policy, len(plans), refill)
    waiting = branching.trunks(plans) if branching is not None else {}

    async def carried_out(plan: RolloutPlan) -> tuple[_Results, list[RolloutPlan]]:
        """The results, and the plans that waited for them."""
        waited = waiting.pop(plan.index, [])
        results = await executor.execute(plan)
        if not waited or branching is None or results is None:
            return results, []
        return results, await branching.grown(results[-1], waited)

    async with asyncio.TaskGroup() as tg:
        waits = {plan.index for later in waiting.values() for plan in later}
        following = [plan for plan in plans if plan.index not in waits]
        running: set[asyncio.Task[tuple[_Results, list[RolloutPlan]]]] = set()
        while following or running:
            running |= {tg.create_task(carried_out(plan), name=plan.rollout_id) for plan in following}
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            following = []
            for run in ended:
                results, grown = run.result()
                draw.take(results)
                following += grown
            following += draw.refills()
    if draw.unfinished:
        raise Unfinished
    return draw


class _Draw:
    """One rollout for each place of the group. Decides which broken rollouts are replaced, and when.

    Once a rollout of the group has succeeded, the task can be rolled out, and broken ones are replaced at once.
    Until then one at a time is, and no more than MOST_IN_VAIN: a task that always breaks must cost little.
    """

    def __init__(self, policy: GroupPolicy, size: int, refill: Refill) -> None:
        self.unfinished = False
        self._policy, self._size, self._refill = policy, size, refill
        self._left = size if policy.kind == "backfill" else 0
        self._members: dict[int, Member] = {}
        self._attempts: list[Attempt] = []
        self._latest: dict[int, RolloutPlan] = {}  # the last plan carried out, by place
        self._broken: list[Attempt] = []  # not replaced yet
        self._refilled: set[int] = set()  # places whose refill is running
        self._in_vain = 0  # refills begun before any rollout succeeded

    def take(self, results: _Results) -> None:
        """Takes the attempts of one rollout; None: the run is being stopped."""
        if results is None:
            self.unfinished = True
            return
        self._attempts += [r.attempt if isinstance(r, Member) else r for r in results]
        last = results[-1]
        plan = self._attempts[-1].plan
        self._latest[plan.index] = plan
        self._refilled.discard(plan.index)
        if isinstance(last, Member):
            self._members[plan.index] = last
            return
        name = last.outcome.name
        if name is FailedName.BAD_TASK:
            self._left = 0
        if name is not FailedName.AGENT_ERROR:  # it was tried again already, and no more than once
            self._broken.append(last)

    def refills(self) -> list[RolloutPlan]:
        """Plans of rollouts to begin now."""
        if self.unfinished:
            return []
        now = self._left
        if not self._members:
            now = min(now, int(not self._refilled and self._in_vain < MOST_IN_VAIN))
        replaced, self._broken = self._broken[:now], self._broken[now:]
        self._left -= len(replaced)
        self._in_vain += 0 if self._members else len(replaced)
        self._refilled |= {attempt.plan.index for attempt in replaced}
        return [self._refill(attempt.plan) for attempt in replaced]

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of the places."""
        return tuple(self._members[index] for index in sorted(self._members))

    @property
    def scores(self) -> list[float]:
        return [member.score.value for member in self.members]

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """In the order of the places."""
        return tuple(sorted(self._attempts, key=lambda attempt: (attempt.plan.index, attempt.plan.attempt)))

    @property
    def latest(self) -> list[RolloutPlan]:
        """The last plan of each place, in the order of the places."""
        return [self._latest[index] for index in sorted(self._latest)]

    @property
    def is_enough(self) -> bool:
        """Whether the group needs no more members."""
        return len(self._members) >= self._policy.enough(self._size)


def verdict(
    policy: GroupPolicy, group_size: int, scores: Sequence[float], failures: Sequence[Failed]
) -> str | None:
    """Why a group whose members have these scores is no training data, or None. `failures`: of its attempts."""
    if len(scores) >= policy.enough(group_size):
        if policy.zero_variance == "drop" and same(scores):
            return f"all {len(scores)} rollouts have the same score, {scores[0]:g}"
        return None
    usable = f"{len(scores)} of {group_size} rollouts usable"
    if not failures:
        return usable
    commonest = Counter(failure.name for failure in failures).most_common(1)[0][0]
    first = next(failure for failure in failures if failure.name is commonest)
    return f"{usable}, mostly {commonest}: {first.headline}"


def same(scores: Sequence[float]) -> bool:
    """Whether there are several scores and all are the same."""
    return len(scores) > 1 and len(set(scores)) == 1
