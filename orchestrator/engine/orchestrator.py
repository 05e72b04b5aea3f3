"""The engine: tasks in, groups out. Commands use it, `serve` in `atropos/`, and programs:

async with Orchestrator(config) as orchestrator:
    async for group in orchestrator.groups(tasks):
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing

from orchestrator.completion.callback import Sampler
from orchestrator.engine.draws import Draw, Draws, Number, Pause
from orchestrator.engine.groups import GroupStream, open_groups
from orchestrator.engine.one_group import GroupMaker
from orchestrator.engine.run_json import describe
from orchestrator.engine.shared import Shared
from orchestrator.engine.starts import Starts
from orchestrator.errors import ConfigError, CostReached
from orchestrator.host.base import Hosts
from orchestrator.rules.observer import Observer
from orchestrator.rules.policy import Policy
from orchestrator.rules.pools import Pools
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.earlier import Earlier
from orchestrator.run.output import OpenRun, open_run, program_run_path
from orchestrator.run.rows import Row, bad_task_row, group_rows, unfinished_row
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.types import BadTask, Group, Split, Task


class Orchestrator:
    """Everything a run needs, opened on entry and closed on exit: hosts with their sandboxes, scorer, tokenizer.

    Without an `observer`, what happens is recorded in `env.run_dir` if that is set, as `orchestrator process`
    does. A given observer decides alone what is recorded. `policy`: a trainer that updates the endpoint's weights
    says so: `await orchestrator.policy.serve(version)`. `sampler`: samples completions in the place of an
    endpoint; no `openai.base_url` is set then. `shared`: see `beside`.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer | None = None,
        *,
        split: Split = "train",
        sampler: Sampler | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.config = config
        self.observer = observer or Observer()
        self.shared = shared or Shared(config, self.observer.say)
        self.maker = GroupMaker(config, self.observer, self.shared, split)
        self._sampler = sampler
        self._records = observer is None
        self._output: OpenRun | None = None
        if config.env.curriculum == "pools" and split == "train":
            self.maker.pools = Pools(lambda: self.shared.seed)
        self._draws = Draws(self.maker.fitting, self.shared.built, self.maker.pools)
        self._draws_by_pools = False  # a call does
        self._stack = AsyncExitStack()

    def beside(self, config: Config, observer: Observer, *, split: Split) -> Orchestrator:
        """An orchestrator with other settings that shares this one's hosts, scorer, seed and `drain`. It need not
        be opened, and works while this one is open."""
        self.shared.open_now  # noqa: B018 - raises unless it is open
        observer.listeners += self.shared.watchers
        return Orchestrator(config, observer, split=split, shared=self.shared)

    async def __aenter__(self) -> Orchestrator:
        """Checks and opens everything. Raises EnvironmentUnusable before any task is touched, and ConfigError. A
        `drain` meanwhile cancels it."""
        run_path = program_run_path(self.config.env) if self._records else None
        if run_path is not None:
            self.observer.run_path = run_path
        async with AsyncExitStack() as stack:
            files = stack.enter_context(ExitStack())  # closed last: cancelled attempts are still recorded
            await self.shared.open(self.config, self.observer, self._sampler, stack)
            self.maker.agent_spec()  # raises ConfigError
            self.maker.demand_logprobs()
            if self.maker.pools is not None:  # then a round waits for a group only if so many have overtaken it
                self.maker.pools.lag = open_groups(self.config.env, self.hosts.capacity)
            if self.config.env.start_at is not None and self.maker.split == "train":
                starts = await asyncio.to_thread(Starts.read, self.config)
                starts.lag = open_groups(self.config.env, self.hosts.capacity)
                self.maker.starts, self.maker.begin = starts, starts.begin
            if run_path is not None:
                form = self.maker.group_format
                output = files.enter_context(open_run(self.config.env, run_path, Tally(), form))
                await describe(output.run, self.maker, "tasks of a program", output.about)
                self.observer.writer = output.run
                self.record_to(output)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._output = None

    @property
    def hosts(self) -> Hosts:
        """Where plans are carried out. Only while open."""
        return self.maker.hosts

    @property
    def policy(self) -> Policy:
        """Which weights the endpoint has."""
        return self.shared.policy

    def drain(self) -> None:
        """Stops launching. Running rollouts come to their end; groups that then lack a rollout stay unfinished."""
        self.shared.drain()

    @property
    def stopping(self) -> bool:
        """Whether `drain` was called."""
        return self.shared.stopping.is_set()

    @property
    def cut_short(self) -> bool:
        """Whether `drain` was called while there was work left. For `env.max_cost` CostReached says so."""
        cost_limit = self.shared.costs.cost_limit
        return self.stopping and not (cost_limit is not None and cost_limit.is_empty)

    async def groups(
        self, tasks: Iterable[Task | BadTask], earlier: Earlier | None = None, *, epoch: int | None = None
    ) -> AsyncGenerator[Group, None]:
        """Yields groups as they end, complete or with the reason why not. Bad tasks go to the observer.

        There are `env.total_steps` groups, or one per task for -1. If there are fewer tasks, they come again
        with new seeds. Numbers of groups go on from call to call. `epoch`: the seeds follow from it; None: one
        that no call has had. `earlier`: what an earlier process of the run did; its groups do not come again.
        Closing the generator (use `contextlib.aclosing` for loops that may be left early) cancels the running
        rollouts and removes their sandboxes.
        """
        if self.shared.opened is None:
            async with self, aclosing(self.groups(tasks, earlier, epoch=epoch)) as groups:
                async for group in groups:
                    yield group
            return
        limit, earlier, pools = self.config.env.total_steps, earlier or Earlier(), self.maker.pools
        if pools is not None:
            self.config.env.demand_rounds()
            _demand_list(tasks)
            if self._draws_by_pools:
                raise ConfigError(
                    "env.curriculum: with pools, one groups(tasks) is read at a time; close the other"
                )
            pools.give_up()  # of a call that was left early: its thread may have drawn a group behind that
        known: dict[str, Number] = {"done": earlier.written.__contains__, "bad": earlier.bad.__contains__}
        draws: Iterator[Draw | Pause]
        if limit < 0:
            draws = self._draws.once(tasks, epoch=epoch, size=None, **known)
        else:  # for evaluation a task is measured once
            draws = self._draws.several(tasks, limit, epoch=epoch, rounds=self.maker.split == "train", **known)
        self._draws_by_pools = pools is not None
        try:
            async with aclosing(self._recorded(draws, earlier)) as recorded:
                async for group in recorded:
                    yield group
        finally:
            self._draws_by_pools = False

    async def rollouts(
        self, tasks: Iterable[Task | BadTask], *, epoch: int | None = None, group_size: int | None = None
    ) -> list[Row]:
        """Rolls every task out once and waits for all of it.

        The rows are in the order of the tasks, then of the places in the group; a rollout's side rows follow its
        main row. Every task has `group_size` (None: `env.group_size`) main rows, whatever became of it: a
        rollout without a score, a dropped group, a bad task, and what `drain` left unfinished have rows that say
        so. `epoch` as for `groups`. Raises what ends a run; then all rollouts are cancelled. Where `env.max_cost`
        is reached, what is done is returned, and the next call raises CostReached.
        """
        if self.config.env.total_steps >= 0:
            raise ConfigError("env.total_steps: rollouts(tasks) rolls every task out once; leave it at -1")
        if self.maker.pools is not None:
            raise ConfigError(
                "env.curriculum: rollouts(tasks) rolls every task out once; leave it out, or read groups(tasks)"
            )
        size = self.config.env.group_size if group_size is None else group_size
        if type(size) is not int or size < 1:
            raise ConfigError(f"group_size: {size!r} is no whole number of at least 1")
        if self.maker.branching is not None:
            self.maker.branching.rule.demand_size(size, "group_size")
        # Tasks may be made as they are read: off the event loop.
        draws = await asyncio.to_thread(list, self._draws.once(tasks, epoch=epoch, size=size))
        rows: dict[int, list[Row]] = {}
        try:
            async with aclosing(self._recorded(iter(draws), Earlier())) as recorded:
                async for group in recorded:
                    rows[group.number] = self.rows(group)
        except CostReached:
            if not rows:
                raise
        for draw in draws:
            if isinstance(draw.task, BadTask):
                rows[draw.number] = [bad_task_row(draw.task, draw.number, index) for index in range(size)]
            elif draw.number not in rows:
                rows[draw.number] = [unfinished_row(draw.task, draw.number, index) for index in range(size)]
        return [row for draw in draws for row in rows[draw.number]]

    def rows(self, group: Group) -> list[Row]:
        """The group as rows, for trainers. Only while open."""
        return group_rows(group, self.maker.group_format)

    async def _recorded(self, draws: Iterator[Draw | Pause], earlier: Earlier) -> AsyncGenerator[Group, None]:
        """Groups as they end, on disk if the orchestrator records."""
        async with aclosing(GroupStream(self.maker, draws, earlier).groups()) as groups:
            async for group in groups:
                if self._records:
                    await uninterrupted(self._record(group))  # a written group is counted even when cancelled here
                yield group

    async def _record(self, group: Group) -> None:
        if self._output is not None and group.dropped is None:
            await self._output.groups.append(group)
        await self.observer.group(group)

    def record_to(self, output: OpenRun) -> None:
        """Writes groups there as they end, and tells the observer, before `groups` yields them."""
        self._output, self._records = output, True


def _demand_list(tasks: Iterable[Task | BadTask]) -> None:
    """Raises ConfigError for tasks that cannot be read again, and may have no end."""
    if isinstance(tasks, Iterator):
        raise ConfigError(
            "env.curriculum: pools reads the tasks round after round; hand over a list or load_tasks(config), no "
            "iterator"
        )
