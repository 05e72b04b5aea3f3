"""The engine: tasks in, groups out. `process`, `evaluate` and `replay` use it, and `serve` in `atropos/`.

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
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from orchestrator.breaker import GROUPS, HealthGate
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.executor import Executor
from orchestrator.grade import grade
from orchestrator.group import GroupPolicy, Unfinished, run_group
from orchestrator.hosts import Hosts, Provision
from orchestrator.launch.docker.hardening import too_large
from orchestrator.observer import Observer
from orchestrator.opening import open_hosts, open_scorer
from orchestrator.plan import backfill, plan_group
from orchestrator.proxy.left_files import OutputRule
from orchestrator.redact import redact
from orchestrator.run.earlier import Earlier
from orchestrator.run.groups import GroupFormat
from orchestrator.scorers.base import Scorer
from orchestrator.tools.base import HostTool
from orchestrator.types import (
    Attempt,
    BadTask,
    EndedName,
    Group,
    Limits,
    Member,
    RolloutPlan,
    Split,
    Task,
)
from orchestrator.waits import uninterrupted

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

log = logging.getLogger(__name__)

READY_GROUPS = 16  # finished groups not taken yet; with more, rollouts wait


class Recorded(Protocol):
    """Attempts that are known already and are not made again."""

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt | None:
        """The result of this attempt; None: unknown, so it is to be made."""


class Orchestrator:
    """Everything a run needs, opened on entry and closed on exit: hosts with their sandboxes, scorer,
    tokenizer."""

    def __init__(self, config: Config, observer: Observer | None = None, *, split: Split = "train") -> None:
        self.config = config
        self.observer = observer or Observer()
        self.split = split
        self.seed = config.env.seed if config.env.seed is not None else secrets.randbits(31)
        self._stack = AsyncExitStack()
        self._hosts: Hosts | None = None
        self._scorer: Scorer | None = None
        self._stopping = asyncio.Event()

    def beside(self, config: Config, observer: Observer, *, split: Split) -> Orchestrator:
        """An orchestrator with other settings that shares this one's hosts, scorer, seed and `drain`. It need not
        be opened, and works while this one is open."""
        other = Orchestrator(config, observer, split=split)
        other.seed, other._scorer = self.seed, self._scorer
        other._hosts, other._stopping = self.hosts, self._stopping
        return other

    async def __aenter__(self) -> Orchestrator:
        """Checks and opens everything. Raises EnvironmentUnusable before any task is touched."""
        async with AsyncExitStack() as stack:
            self._scorer = await open_scorer(self.config, stack)
            self._hosts = await open_hosts(
                self.config, stack, self.observer.notes, self.observer.say, self.observer.node
            )
            self._stack = stack.pop_all()
        # Imported objects live for ever: left out of garbage collections, they do not slow these down.
        gc.freeze()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hosts = None
        await self._stack.aclose()

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

    @property
    def open_groups(self) -> int:
        """How many groups may be open. Only while open."""
        return self.config.env.open_groups(self.hosts.capacity)

    @property
    def group_format(self) -> GroupFormat:
        """How this run's groups become training data. Only while open."""
        env = self.config.env
        return GroupFormat(
            include_messages=env.include_messages,
            untrained=frozenset(EndedName(name) for name in env.untrained_outcomes),
            mixed_versions=env.train_mixed_versions,
            all_segments=env.trained_segments == "all_segments",
            tokenizer=self.hosts.tokenizer,
        )

    async def facts(self) -> dict[str, object]:
        """What run.json says besides the configuration: tokenizer, kind of token ids, agent, sandbox."""
        tokenizer, told = self.hosts.tokenizer, await self.hosts.describe()
        identity = "its own" if self.config.env.program is None else "that of model-written code"
        return {
            "tokenizer": tokenizer.name if isinstance(tokenizer, HubTokenizer) else None,
            "token_ids": "exact" if self.hosts.takes_ids else "from text",
            **told,
            "agent": {"kind": self.config.env.agent_kind, "identity": identity, **told["agent"]},
        }

    def drain(self) -> None:
        """Stops launching. Running rollouts come to their end; groups that then lack a rollout stay unfinished."""
        self._stopping.set()
        if self._hosts is not None:
            self._hosts.drain()

    @property
    def stopping(self) -> bool:
        """Whether `drain` was called."""
        return self._stopping.is_set()

    def summary(self) -> str:
        """One line for people: model, endpoint, group size, and how many sandboxes may live at once."""
        env = self.config.env
        source = "exact token ids" if self.hosts.takes_ids else "text"
        return (
            f"{self.config.openai[0].model_name} at {redact(self.config.openai[0].base_url)} ({source}); "
            f"groups of {env.group_size}, {self.hosts.summary()}"
        )

    async def groups(
        self, tasks: Iterable[Task | BadTask], earlier: Earlier | None = None
    ) -> AsyncGenerator[Group, None]:
        """Yields groups as they end, complete or with the reason why not. Bad tasks go to the observer.

        There are `env.total_steps` groups, or one per task for -1. If there are fewer tasks, they come again
        with new seeds. `earlier`: what an earlier process of the run did; its groups do not come again. Closing
        the generator (use `contextlib.aclosing` for loops that may be left early) cancels the running rollouts
        and removes their sandboxes.
        """
        earlier = earlier or Earlier()
        if self._hosts is None:
            async with self, aclosing(self.groups(tasks, earlier)) as groups:
                async for group in groups:
                    yield group
            return
        finished: asyncio.Queue[Group | BaseException | None] = asyncio.Queue(READY_GROUPS)
        listening = True

        async def produce() -> None:
            end: BaseException | None = None
            try:
                await self._produce(tasks, finished, earlier)
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
        tasks: Iterable[Task | BadTask],
        finished: asyncio.Queue[Group | BaseException | None],
        earlier: Earlier,
    ) -> None:
        """Keeps the sandboxes busy: begins the next group as soon as no rollout waits for a slot, so that a free
        slot is always taken at once. At most `open_groups` groups are open.

        Raises an exception group, with every rollout cancelled.
        """
        executor = self.executor(earlier)
        open_groups = 0
        changed = asyncio.Event()
        executor.settled = changed.set
        more = True

        async def one(task: Task, number: int, epoch: int) -> None:
            nonlocal open_groups
            try:
                await finished.put(await self.group(task, number, epoch, executor))
            except Unfinished:
                log.debug("group %d stays unfinished", number)
            finally:
                executor.end(number)
                open_groups -= 1
                changed.set()

        with self.hosts.following(lambda: math.inf if more else executor.waiting):
            async with asyncio.TaskGroup() as tg:
                stream = self._stream(tasks)
                # Sources read files or the network: off the event loop, one task at a time.
                while not self._stopping.is_set() and (item := await asyncio.to_thread(next, stream, None)):
                    task, number, epoch = item
                    if isinstance(task, BadTask):
                        if number not in earlier.bad:
                            await uninterrupted(self.observer.bad_task(task, number))
                        continue
                    if number in earlier.written:
                        continue
                    while open_groups >= self.open_groups or not executor.has_room():
                        changed.clear()
                        await changed.wait()
                    executor.begin(number, self.config.env.group_size)
                    open_groups += 1
                    tg.create_task(one(task, number, epoch), name=f"group {number}")
                more = False

    def _stream(self, tasks: Iterable[Task | BadTask]) -> Iterator[tuple[Task | BadTask, int, int]]:
        """(task, number in the stream, epoch). Only good tasks count against `env.total_steps`."""
        wanted = self.config.env.total_steps
        number = epoch = good = 0
        while True:
            good_before = good
            for row in tasks:
                task = self.fitting(row)
                if 0 <= wanted <= good:
                    return
                if epoch and isinstance(task, BadTask):
                    continue  # reported in the first round
                yield task, number, epoch
                number += 1
                good += isinstance(task, Task)
            epoch += 1
            if wanted < 0 or good == good_before or self.split == "eval":  # a task is measured once
                return

    def fitting(self, task: Task | BadTask) -> Task | BadTask:
        """The task, or a BadTask if its files are too large for a sandbox."""
        if isinstance(task, Task) and task.attachments and self.config.env.launcher != "process":
            reason = too_large(task.attachments, self.config.env.sandbox_memory)
            return BadTask(task.task_id, reason) if reason else task
        return task

    async def group(
        self,
        task: Task,
        number: int,
        epoch: int,
        executor: Executor,
        *,
        longest_s: float = math.inf,
        longest_tokens: int | None = None,
    ) -> Group:
        """One group, complete or dropped. Raises Unfinished after `drain`.

        No rollout takes longer than `longest_s` from its assignment, and no line of tokens gets longer than
        `longest_tokens`, whatever limits the task has.
        """
        config = self.config
        plans = plan_group(
            task,
            number=number,
            group_size=config.env.group_size,
            epoch=epoch,
            seed=self.seed,
            sampling=config.sampling,
            agent=config.agent_spec(),
            sandbox=config.sandbox_spec(),
            limits=config.limits,
            split=self.split,
        )
        bounded = [replace(plan, limits=_bounded(plan.limits, longest_s, longest_tokens)) for plan in plans]
        return await run_group(
            task,
            bounded,
            executor,
            GroupPolicy.parse(config.env.group_policy, config.env.zero_variance),
            lambda plan: backfill(plan, self.seed, epoch),
        )

    def executor(
        self, earlier: Recorded | None = None, *, tools: Mapping[str, HostTool] | None = None
    ) -> Executor:
        """An executor for a caller that makes its own `group` calls, or plans. `tools`: in place of the run's.
        Only while open."""
        env, known, scorer, tokenizer = self.config.env, earlier or Earlier(), self._scorer, self.hosts.tokenizer
        assert scorer is not None  # set together with `hosts`

        async def graded(attempt: Attempt) -> Member | Attempt:
            return await grade(attempt, tokenizer, scorer)

        return Executor(
            self.hosts,
            # Rollouts of orchestrators that share hosts have the same ids: each has its own folder for files.
            provision=Provision(self._output_rule(), tools),
            max_retries=env.max_retries,
            graded=graded,
            recorded=self.observer.recorded,
            started=self.observer.started,
            earlier=lambda plan: known.result(plan, tokenizer),
            stopping=self._stopping,
            health=HealthGate(window=GROUPS * 2 * env.group_size),  # every rollout may be refilled once
        )


def _bounded(limits: Limits, longest_s: float, longest_tokens: int | None) -> Limits:
    tokens = limits.max_token_length if longest_tokens is None else min(limits.max_token_length, longest_tokens)
    return replace(limits, deadline_s=min(limits.deadline_s, longest_s), max_token_length=tokens)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in the nested groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
