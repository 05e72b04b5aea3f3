"""The engine: tasks in, groups out. Commands use it, `serve` in `atropos/`, and programs:

async with Orchestrator(config) as orchestrator:
    async for group in orchestrator.groups(tasks):
        ...
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.agents.call_format import call_format
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.called import Sampler
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.trajectory import in_lines, sampled_by
from orchestrator.engine.draws import Draw, Draws
from orchestrator.engine.executor import Executor
from orchestrator.engine.group import GroupPolicy, Unfinished, run_group
from orchestrator.engine.health import GROUPS, AgentGate, HealthGate
from orchestrator.errors import ConfigError, CostReached
from orchestrator.host.base import Hosts, Provision
from orchestrator.host.open import open_hosts
from orchestrator.launch.hardening import too_large
from orchestrator.launch.names import is_path
from orchestrator.proxy.left_files import OutputRule
from orchestrator.rules.observer import Listener, Observer
from orchestrator.rules.plan import backfill, plan_group, sandbox_of, seed_again
from orchestrator.rules.policy import Policy
from orchestrator.rules.purse import Purse
from orchestrator.rules.redact import redact
from orchestrator.rules.text import one_line
from orchestrator.rules.waits import first_error, first_of, uninterrupted
from orchestrator.run.earlier import Earlier
from orchestrator.run.groups import GroupFormat
from orchestrator.run.output import OpenRun, open_program_run, program_run_path
from orchestrator.run.prices import Prices
from orchestrator.run.rows import Row, bad_task_row, group_rows, unfinished_row
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.grade import grade
from orchestrator.scorers.open import open_scorer
from orchestrator.scorers.trial import Trial
from orchestrator.telemetry import open_watchers
from orchestrator.tools.base import HostTool
from orchestrator.types import (
    AgentSpec,
    Attempt,
    BadTask,
    Group,
    Limits,
    Member,
    PolicySpan,
    RolloutPlan,
    Split,
    Task,
)

if TYPE_CHECKING:
    from orchestrator.run.tally import Tally
    from orchestrator.settings.config import Config

log = logging.getLogger(__name__)

READY_GROUPS = 16  # finished groups not taken yet; with more, rollouts wait


class Recorded(Protocol):
    """Attempts that are known already and are not made again."""

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt | None:
        """The result of this attempt; None: unknown, so it is to be made."""


class Orchestrator:
    """Everything a run needs, opened on entry and closed on exit: hosts with their sandboxes, scorer, tokenizer.

    Without an `observer`, what happens is recorded in `env.run_dir` if that is set, as `orchestrator process`
    does. A given observer decides alone what is recorded. `policy`: a trainer that updates the endpoint's weights
    says so: `await orchestrator.policy.serve(version)`. `sampler`: samples completions in the place of an
    endpoint; no `openai.base_url` is set then.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer | None = None,
        *,
        split: Split = "train",
        sampler: Sampler | None = None,
    ) -> None:
        self.config = config
        self._sampler = sampler
        self.observer = observer or Observer()
        self._records = observer is None
        self._output: OpenRun | None = None
        self.split = split
        self.policy = Policy()
        self.seed = config.env.seed if config.env.seed is not None else secrets.randbits(31)
        self._stack = AsyncExitStack()
        self._hosts: Hosts | None = None
        self._opening: asyncio.Task[Any] | None = None
        self._scorer: Scorer | None = None
        self._trial: Trial | None = None
        self._watching: list[Listener] = []  # count whatever this engine's hosts do
        self._stopping = asyncio.Event()
        self._draws = Draws(self.fitting)
        self._prices = Prices.of(config)
        self.purse = self._purse()  # None: there is no limit
        self.drained: list[Callable[[], None]] = []  # called by `drain`
        # One for all calls: a program may ask for a few groups at a time. Every rollout may be refilled once.
        self._health = HealthGate(window=GROUPS * 2 * config.env.group_size)
        self._agent_gate = AgentGate(self.observer.say)

    def beside(self, config: Config, observer: Observer, *, split: Split) -> Orchestrator:
        """An orchestrator with other settings that shares this one's hosts, scorer, seed and `drain`. It need not
        be opened, and works while this one is open."""
        other = Orchestrator(config, observer, split=split)
        other.seed, other._scorer, other.policy = self.seed, self._scorer, self.policy
        other._trial, other._agent_gate = self._trial, self._agent_gate
        observer.listeners += self._watching
        other._hosts, other._stopping, other.purse = self.hosts, self._stopping, self.purse
        return other

    async def __aenter__(self) -> Orchestrator:
        """Checks and opens everything. Raises EnvironmentUnusable before any task is touched, and ConfigError.

        A `drain` meanwhile cancels it: an endpoint may load for minutes, and there is nothing yet to bring to its
        end.
        """
        run_path = program_run_path(self.config.env) if self._records else None
        if run_path is not None:
            self.observer.run_path = run_path
        self._opening = asyncio.current_task()
        try:
            async with AsyncExitStack() as stack:
                files = stack.enter_context(ExitStack())  # closed last: cancelled attempts are still recorded
                await self._open(stack)
                if run_path is not None:
                    self._output = await open_program_run(self, run_path, files)
                    self.observer.writer = self._output.run
                self._stack = stack.pop_all()
        except BaseException:
            self._hosts = None
            raise
        finally:
            self._opening = None
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        observer = self.observer
        self._watching = await open_watchers(self.config, lambda: self._hosts, stack, observer)
        for watcher in self._watching:  # from now on: an endpoint may be waited for
            observer.listeners.append(watcher)
            stack.callback(observer.listeners.remove, watcher)
        try:
            async with asyncio.TaskGroup() as meanwhile:  # the judge's endpoint may be waited for
                self._scorer = await open_scorer(self.config, stack, observer.say, meanwhile)
                self._trial = Trial.of(self._scorer)
                hosts = await open_hosts(
                    self.config,
                    stack,
                    observer.notes,
                    observer.say,
                    observer.node,
                    self.policy,
                    self._sampler,
                    self.purse,
                )
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        self._hosts = hosts
        self.agent_spec()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hosts = None
        await self._stack.aclose()
        self._output = None

    def _purse(self) -> Purse | None:
        most, prices = self.config.env.max_cost, self._prices
        if most is None:
            return None
        if prices is None:
            raise ConfigError(
                "env.max_cost: needs prices: set openai.prompt_price and openai.completion_price, or "
                "env.price_table"
            )
        return Purse(most, prices.cost, self._out_of_money)

    def open_purse(self, tally: Tally, evaluations: Sequence[Tally] = ()) -> None:
        """`tally`: of what earlier processes of the run have done; `evaluations`: of each one that they made. If
        `env.max_cost` leaves nothing, nothing is begun."""
        if self.purse is None:
            return
        self.purse.open(
            tally.cost + math.fsum(one.cost for one in evaluations),
            [(self.split, *place) for place in tally.ungraded]
            + [("eval", *place) for one in evaluations for place in one.ungraded],
        )

    def _out_of_money(self) -> None:
        self.observer.say("env.max_cost: no rollout is begun any more; those under way come to their end")
        self.drain()

    def _output_rule(self) -> OutputRule | None:
        env, folder = self.config.env, self.observer.output_folder
        if folder is None or not env.output_files:
            return None
        return OutputRule(folder, env.output_files, env.output_bytes)

    @property
    def hosts(self) -> Hosts:
        """Where plans are carried out. Only while open."""
        if self._hosts is None:
            raise RuntimeError("the orchestrator is not open: use `async with Orchestrator(config)`")
        return self._hosts

    def agent_spec(self) -> AgentSpec:
        """How agents are built for the model of this run. Only while open. Raises ConfigError."""
        spec = self.config.agent_spec()
        return replace(spec, call_format=call_format(self.config.env, spec, self.hosts.tokenizer))

    @property
    def open_groups(self) -> int:
        """How many groups may be open. Only while open."""
        return self.config.env.open_groups(self.hosts.capacity)

    @property
    def group_format(self) -> GroupFormat:
        """How this run's groups become training data. Only while open."""
        return GroupFormat.of(self.config.env, self.hosts.tokenizer)

    async def facts(self) -> dict[str, object]:
        """What run.json says besides the configuration: tokenizer, kind of token ids, agent, sandbox."""
        tokenizer, told = self.hosts.tokenizer, await self.hosts.describe()
        identity = "its own" if self.config.env.program is None else "that of model-written code"
        spec = self.agent_spec()
        calls = {"tool_calls": spec.call_format or "json"} if spec.calls_tools else {}
        return {
            "tokenizer": tokenizer.name if isinstance(tokenizer, HubTokenizer) else None,
            "token_ids": "exact" if self.hosts.takes_ids else "from text",
            **({"why_text": self.hosts.why_text} if self.hosts.why_text else {}),
            **({"prices": self._prices.public()} if self._prices is not None else {}),
            **told,
            "agent": {"kind": spec.kind, "identity": identity, **calls, **told["agent"]},
        }

    @property
    def no_sampled_ids(self) -> str:
        """What token ids there are in place of the sampled ones, and why, for people; empty: the sampled ones.
        Only while open."""
        if self.hosts.takes_ids:
            return ""
        made = "none" if self.hosts.tokenizer is None else "made from text (retokenized)"
        return f"{made}: {one_line(self.hosts.why_text)}" if self.hosts.why_text else made

    def drain(self) -> None:
        """Stops launching. Running rollouts come to their end; groups that then lack a rollout stay unfinished."""
        self._stopping.set()
        for told in self.drained:
            told()
        if self._hosts is not None:
            self._hosts.drain()
        elif self._opening is not None:
            self._opening.cancel()

    @property
    def stopping(self) -> bool:
        """Whether `drain` was called."""
        return self._stopping.is_set()

    @property
    def cut_short(self) -> bool:
        """Whether `drain` was called while there was work left. For `env.max_cost` CostReached says so."""
        return self.stopping and not (self.purse is not None and self.purse.is_empty)

    def summary(self) -> str:
        """One line for people: model, endpoint, group size, and how many sandboxes may live at once."""
        env, other = self.config.env, self.no_sampled_ids
        source = f"token ids {other}" if other else "exact token ids"
        address = redact(self.config.openai[0].base_url) or "the program itself"
        return (
            f"{self.config.openai[0].model_name} at {address} ({source}); "
            f"groups of {env.group_size}, {self.hosts.summary()}"
        )

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
        if self._hosts is None:
            async with self, aclosing(self.groups(tasks, earlier, epoch=epoch)) as groups:
                async for group in groups:
                    yield group
            return
        wanted = self.config.env.total_steps
        if wanted < 0:
            draws = self._draws.once(tasks, epoch=epoch, size=None)
        else:  # for evaluation a task is measured once
            draws = self._draws.several(tasks, wanted, epoch=epoch, rounds=self.split == "train")
        async with aclosing(self._ended(draws, earlier or Earlier())) as ended:
            async for group in ended:
                yield group

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
        size = self.config.env.group_size if group_size is None else group_size
        if type(size) is not int or size < 1:
            raise ConfigError(f"group_size: {size!r} is no whole number of at least 1")
        # Tasks may be made as they are read: off the event loop.
        draws = await asyncio.to_thread(list, self._draws.once(tasks, epoch=epoch, size=size))
        found: dict[int, list[Row]] = {}
        try:
            async with aclosing(self._ended(iter(draws), Earlier())) as ended:
                async for group in ended:
                    found[group.number] = self.rows(group)
        except CostReached:
            if not found:
                raise
        for draw in draws:
            if isinstance(draw.task, BadTask):
                found[draw.number] = [bad_task_row(draw.task, draw.number, index) for index in range(size)]
            elif draw.number not in found:
                found[draw.number] = [unfinished_row(draw.task, draw.number, index) for index in range(size)]
        return [row for draw in draws for row in found[draw.number]]

    def rows(self, group: Group) -> list[Row]:
        """The group as rows, for trainers. Only while open."""
        return group_rows(group, self.group_format)

    async def _ended(self, draws: Iterator[Draw], earlier: Earlier) -> AsyncGenerator[Group, None]:
        """Groups as they end, on disk if the orchestrator records."""
        finished: asyncio.Queue[Group | BaseException | None] = asyncio.Queue(READY_GROUPS)
        listening = True

        async def produce() -> None:
            end: BaseException | None = None
            try:
                await self._produce(draws, finished, earlier)
            except BaseExceptionGroup as errors:
                end = first_error(errors)
            except Exception as error:  # before the first group; the consumer below waits for it
                end = error
            if listening:
                await finished.put(end)

        producer = asyncio.create_task(produce(), name="groups")
        try:
            while (item := await finished.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if self._output is not None and item.dropped is None:
                    await uninterrupted(self._output.groups.append(item))
                if self._records:
                    await uninterrupted(self.observer.group(item))
                yield item
        finally:
            listening = False
            producer.cancel()
            # Until sandboxes are removed and attempts recorded, nothing that these need may be closed.
            await uninterrupted(asyncio.wait([producer]))
            if not producer.cancelled() and (error := producer.exception()) is not None:
                log.debug("group producer ended with %r", error)

    async def _produce(
        self,
        draws: Iterator[Draw],
        finished: asyncio.Queue[Group | BaseException | None],
        earlier: Earlier,
    ) -> None:
        """Keeps the sandboxes busy: begins the next group as soon as no rollout waits for a slot, so that a free
        slot is always taken at once. At most `open_groups` groups are open.

        Raises an exception group, with every rollout cancelled.
        """
        executor = self.executor(earlier)
        open_groups = 0
        unfinished = False
        changed = asyncio.Event()
        executor.settled = changed.set
        more = True

        async def one(task: Task, draw: Draw) -> None:
            nonlocal open_groups, unfinished
            number = draw.number
            try:
                await finished.put(
                    await self.group(task, number, draw.epoch, executor, again=draw.again, size=draw.size)
                )
            except Unfinished:
                log.debug("group %d stays unfinished", number)
                unfinished = True
            finally:
                executor.end(number)
                open_groups -= 1
                changed.set()

        with self.hosts.following(lambda: math.inf if more else executor.waiting, changed.set):
            async with asyncio.TaskGroup() as tg:
                # Sources read files or the network: off the event loop, one task at a time.
                while not self._stopping.is_set() and (draw := await asyncio.to_thread(next, draws, None)):
                    task, number = draw.task, draw.number
                    if isinstance(task, BadTask):
                        if number not in earlier.bad:
                            await uninterrupted(self.observer.bad_task(task, number))
                        continue
                    if number in earlier.written:
                        continue
                    size = draw.size or self.config.env.group_size
                    with self.hosts.expecting(sandbox_of(task, self.config.sandbox_spec()), size):
                        while open_groups >= self.open_groups or not executor.has_room():
                            changed.clear()
                            await changed.wait()
                    executor.begin(number, size)
                    open_groups += 1
                    tg.create_task(one(task, draw), name=f"group {number}")
                more = False
        if (purse := self.purse) is None or not purse.is_empty:
            return
        if unfinished or await asyncio.to_thread(lambda: any(_is_work(draw, earlier) for draw in draws)):
            raise purse.reached

    def fitting(self, task: Task | BadTask) -> Task | BadTask:
        """The task, or a BadTask: its files are too large for a sandbox, or the launcher takes no such image."""
        launcher = self.config.env.launcher
        if not isinstance(task, Task) or launcher == "process":
            return task
        reason = too_large(task.attachments, self.config.env.sandbox_memory) if task.attachments else None
        if task.image is not None and is_path(task.image) and launcher != "oci":
            reason = "its image is a file, which only the launcher oci takes (--env.launcher oci)"
        return BadTask(task.task_id, reason) if reason else task

    async def group(
        self,
        task: Task,
        number: int,
        epoch: int,
        executor: Executor,
        *,
        again: int = 0,
        size: int | None = None,
        longest_s: float = math.inf,
        longest_tokens: int | None = None,
    ) -> Group:
        """One group, complete or dropped. Raises Unfinished after `drain`, ScorerUnusable before anything is
        sampled, AgentUnusable. `again`, `size` as in `Draw`.

        No rollout takes longer than `longest_s` from its assignment, and no line of tokens gets longer than
        `longest_tokens`, whatever limits the task has.
        """
        config, seed = self.config, seed_again(self.seed, again)
        plans = plan_group(
            task,
            number=number,
            group_size=config.env.group_size if size is None else size,
            epoch=epoch,
            seed=seed,
            sampling=config.sampling,
            agent=self.agent_spec(),
            sandbox=config.sandbox_spec(),
            limits=config.limits,
            split=self.split,
        )
        bounded = [replace(plan, limits=_bounded(plan.limits, longest_s, longest_tokens)) for plan in plans]
        if self._trial is not None:
            files = self._output_rule() is not None
            tried = self._trial.passed(bounded[0], ids=self.hosts.takes_ids, output=files)
            await first_of(tried, self._stopping.wait())
        group = await run_group(
            task,
            bounded,
            executor,
            GroupPolicy.parse(config.env.group_policy, config.env.zero_variance),
            lambda plan: backfill(plan, seed, epoch),
        )
        self._agent_gate.group(group)
        return self.aged(group)

    def aged(self, group: Group) -> Group:
        """The group with each member's staleness as it is now; dropped if one is over `env.max_staleness`."""
        members = tuple(replace(m, staleness=self.policy.staleness(self._trained(m))) for m in group.members_G)
        most, dropped = self.config.env.max_staleness, group.dropped
        old = [m.staleness for m in members if m.staleness is not None and most is not None and m.staleness > most]
        if old and dropped is None:
            dropped = f"{len(old)} of {len(members)} rollouts are more than {most} policy versions behind"
        return replace(group, members_G=members, dropped=dropped)

    def _trained(self, member: Member) -> Sequence[PolicySpan]:
        """Which policies sampled what there is of it to train on."""
        record = member.attempt.record
        if GroupFormat.of(self.config.env, None).trains_sides(member.attempt.plan.agent.kind):
            return [span for turn, _ in in_lines(record.turns) for span in turn.completion.sampled_by]
        return sampled_by(record, member.trajectory)

    def executor(
        self, earlier: Recorded | None = None, *, tools: Mapping[str, HostTool] | None = None
    ) -> Executor:
        """An executor for a caller that makes its own `group` calls, or plans. `tools`: in place of the run's.
        Only while open."""
        env, known, scorer, tokenizer = self.config.env, earlier or Earlier(), self._scorer, self.hosts.tokenizer
        assert scorer is not None  # set together with `hosts`

        async def graded(attempt: Attempt) -> Member | Attempt:
            return await grade(attempt, tokenizer, scorer, self.observer.output_folder)

        def started(plan: RolloutPlan, node: str) -> None:
            self.observer.started(plan, node)
            if self.purse is not None:
                self.purse.begun(plan.rollout_id, _place(plan))

        async def recorded(result: Member | Attempt) -> None:
            attempt = result.attempt if isinstance(result, Member) else result
            for turn in attempt.record.turns:
                self.policy.saw_all(turn.completion.sampled_by)
            await self.observer.recorded(result)
            self._agent_gate.attempt(attempt)
            if self.purse is not None and self._prices is not None:
                plan, cost = attempt.plan, self._prices.cost_of(attempt)
                self.purse.ended(
                    plan.rollout_id,
                    _place(plan),
                    cost,
                    graded=attempt.ungraded is None,
                    held=env.cluster == "none",
                )

        return Executor(
            self.hosts,
            # Rollouts of orchestrators that share hosts have the same ids: each has its own folder for files.
            provision=Provision(self._output_rule(), tools),
            max_retries=env.max_retries,
            graded=graded,
            recorded=recorded,
            started=started,
            earlier=lambda plan: known.result(plan, tokenizer),
            stopping=self._stopping,
            health=self._health,
        )


def _place(plan: RolloutPlan) -> tuple[str, int, int]:
    """What all attempts of one rollout share."""
    return plan.split, plan.group, plan.index


def _is_work(draw: Draw, earlier: Earlier) -> bool:
    """Whether a group is still to be made for it."""
    return isinstance(draw.task, Task) and draw.number not in earlier.written


def freeze() -> None:
    """For a command whose engine is open: what is imported lives for ever, and slows collections down no more. Not
    for a program, whose own objects would be kept as well."""
    gc.freeze()


def _bounded(limits: Limits, longest_s: float, longest_tokens: int | None) -> Limits:
    tokens = limits.max_token_length if longest_tokens is None else min(limits.max_token_length, longest_tokens)
    return replace(limits, deadline_s=min(limits.deadline_s, longest_s), max_token_length=tokens)
