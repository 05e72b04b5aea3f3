"""What there is while an OrchestratorEnv is open: the engine, the stream of tasks, and the groups made of them.

All groups share one executor: `max_concurrent_sandboxes` bounds them together. What the finished rollouts of a
cancelled group sampled is kept until the group comes again.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.atropos.delivery import Groups
from orchestrator.atropos.kept import Kept
from orchestrator.atropos.position import Ledger, Position
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.engine.groups import open_groups
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.rules.observer import Observer
from orchestrator.rules.waits import uninterrupted
from orchestrator.tasks.base import Source
from orchestrator.types import BadTask


class Work:
    """Makes groups. A trainer's checkpoint may replace the stream."""

    def __init__(self, engine: Orchestrator, tasks: Source, kept: Kept, observer: Observer) -> None:
        self.engine = engine
        self.ledger = Ledger(Position(engine.shared.seed, tasks.name))
        self.executor = engine.maker.executor(kept)
        self._tasks = tasks
        self._kept = kept
        self._observer = observer
        self.stream = self._stream()

    def go_to(self, position: Position) -> None:
        """Begins the task stream at `position`."""
        self.engine.shared.seed = position.seed
        self.ledger.begin(position)
        self.stream = self._stream()

    def _stream(self) -> TaskStream:
        maker, ledger = self.engine.maker, self.ledger

        async def bad_task(task: BadTask, number: int) -> None:
            await self._observer.bad_task(task, number)
            ledger.drop(number)

        built, is_bad = self.engine.shared.built, self._kept.is_bad
        return TaskStream(self._tasks, ledger.is_done, bad_task, maker.fitting, built, is_bad, maker.pools)

    def has_room(self, under_way: int, share: float) -> bool:
        """Whether another group may be begun beside those under way, within that share of the sandboxes."""
        maker = self.engine.maker
        return under_way < open_groups(maker.config.env, maker.hosts.capacity) and self.executor.has_room(share)

    def begin(self, item: Item) -> None:
        """A group is begun."""
        maker = self.engine.maker
        self.executor.begin(item.number, maker.begun_at_once(maker.config.env.group_size))

    async def groups(self, item: Item, longest: int | None) -> list[dict[str, Any]]:
        """One item's groups in Atropos' form, kept until it is `over`; none where the group policy drops it.
        `longest`: tokens of the longest line that the trainer takes; None: any. Raises Unfinished after drain."""
        maker = self.engine.maker
        if (group := self._kept.made.get(item.number)) is None:
            worker_timeout = maker.config.env.worker_timeout
            group = await maker.make(
                item.task,
                item.number,
                item.epoch,
                self.executor,
                longest_s=worker_timeout if worker_timeout > 0 else math.inf,
                longest_tokens=longest,
            )
            made = max((len(m.trajectory.tokens_T) for m in group.members_G), default=0)
            if group.dropped is None and longest is not None and made > longest:  # made for an earlier trainer
                group = replace(group, dropped=f"a line has {made} tokens, the trainer takes {longest}")
            self._kept.made[item.number] = group
        return [] if group.dropped is not None else await asyncio.to_thread(maker.group_format.groups, group)

    async def make(self, item: Item, make: Callable[[Item], Awaitable[Groups]]) -> Groups:
        """What the environment makes of an item by its own methods, fit to be sent."""
        try:
            if (written := self._kept.written.get(item.number)) is not None:
                return written
            groups = await make(item)
            if not groups:
                await self.over(item.number, "postprocess_histories returned no group")
            return [_named(group, item.number) for group in groups]
        finally:
            self.executor.end(item.number)

    async def over(self, number: int, because: str | None = None) -> None:
        """Counts a group that does not come again, as dropped where a reason is given."""
        await self.engine.maker.settle(number)  # of a group that a subclass made
        group = self._kept.forget(number)
        if group is None:  # made by a subclass alone
            return
        if because is not None and group.dropped is None:
            group = replace(group, dropped=because)
        await uninterrupted(self._observer.group(group))


def _named(group: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The group with rollout ids, without which its file cannot be read again: a subclass may leave them out."""
    facts = group.get("overrides") or [None] * len(group["tokens"])
    if all(fact and "rollout_id" in fact for fact in facts):
        return group
    name = {"rollout_id": f"g{number:06d}"}
    return {**group, "overrides": [{**name, **(fact or {})} for fact in facts]}
