"""Makes one group: plans its rollouts, has them carried out and graded, and drops it where they are too old."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.agents.call_format import call_format
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import in_lines, sampled_by
from orchestrator.engine.executor import Executor
from orchestrator.engine.group import GroupPolicy, run_group
from orchestrator.engine.health import GROUPS, HealthGate
from orchestrator.engine.hosts_file import with_hosts
from orchestrator.engine.shared import Shared
from orchestrator.engine.task_needs import why_unfit
from orchestrator.engine.trees import Branching
from orchestrator.errors import ConfigError
from orchestrator.grading.grade import with_tests
from orchestrator.host.base import Hosts, Provision
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.launch.workspaces import WorkspaceError
from orchestrator.proxy.left_files import OutputRule
from orchestrator.rules.observer import Observer
from orchestrator.rules.plan import backfill, plan_group, seed_again
from orchestrator.rules.pools import NOTHING, GroupResult, Pools
from orchestrator.rules.waits import first_of, uninterrupted
from orchestrator.run.groups import GroupFormat
from orchestrator.scorers.grade import grade
from orchestrator.scorers.grader import GRADER
from orchestrator.scorers.open import JUDGE
from orchestrator.scorers.strategies import STRATEGIES
from orchestrator.settings.config import Config
from orchestrator.tasks.checks import with_checked
from orchestrator.tools.base import HostTool
from orchestrator.types import (
    AgentSpec,
    Attempt,
    BadTask,
    Group,
    Limits,
    Member,
    PolicySpan,
    Prefix,
    RolloutPlan,
    Split,
    Task,
)

if TYPE_CHECKING:
    from orchestrator.engine.starts import Starts


class Recorded(Protocol):
    """Attempts of an earlier process, which are not made again."""

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt | None:
        """The result of this attempt; None: it is to be made."""


class GroupMaker:
    """Makes the groups of one split, with one configuration, on hosts that others may share."""

    def __init__(self, config: Config, observer: Observer, shared: Shared, split: Split) -> None:
        self.config = config
        self.observer = observer
        self.shared = shared
        self.split = split
        rule = config.env.branch_rule if split == "train" else None  # an evaluation measures whole rollouts
        self.branching = None if rule is None else Branching(rule)
        self.pools: Pools | None = None  # choose the tasks, and hear of every group
        self.starts: Starts | None = None  # as `begin` goes by them: they hear of every group too
        self.begin: Begin | None = None  # says where a group's rollouts begin; None: with their task
        # One for all calls: a program may ask for a few groups at a time. Every rollout may be refilled once.
        self._health = HealthGate(window=GROUPS * 2 * config.env.group_size)

    @property
    def hosts(self) -> Hosts:
        """Where plans are carried out. Only while open."""
        return self.shared.open_now.hosts

    @property
    def group_format(self) -> GroupFormat:
        """How groups become training data. Only while open."""
        env = self.config.env
        return GroupFormat.of(env, self.hosts.tokenizer, include_messages=env.include_messages)

    def agent_spec(self) -> AgentSpec:
        """How agents are built for the model of this run. Only while open. Raises ConfigError."""
        spec = self.config.agent_spec()
        return replace(spec, call_format=call_format(self.config.env, spec, self.hosts.tokenizer))

    def demand_logprobs(self) -> None:
        """Raises ConfigError where `env.branch` goes by log-probs and the endpoint tells none. Only while open."""
        if self.branching is not None and self.branching.rule.kind == "entropy" and not self.hosts.takes_ids:
            raise ConfigError(
                f"env.branch: entropy needs log-probs of sampled ids ({self.hosts.why_text}); use turns:K"
            )

    def begun_at_once(self, size: int) -> int:
        """How many rollouts of a group of this size need a sandbox when it begins: branches wait for trunks."""
        return size if self.branching is None else size // self.branching.rule.tree_size(size)

    def fitting(self, task: Task | BadTask) -> Task | BadTask:
        """The task, its workspace and its tests unpacked, or a BadTask: the run makes no such sandbox. Blocks.
        Raises EnvironmentUnusable."""
        if not isinstance(task, Task):
            return task
        env = self.config.env
        if reason := _why_unscored(task, env.scoring_strategy):
            return BadTask(task.task_id, reason)
        if task.steps and not env.most_grading:
            return BadTask(task.task_id, "its steps are graded while its sandbox waits: --env.grading_sandboxes 1")
        if task.context and self.config.agent_spec().kind == "program":
            return BadTask(
                task.task_id, "a conversation comes before it, which no program can be given: see env.agent"
            )
        if reason := why_unfit(task, env, self.config.sandbox_spec(task)):
            return BadTask(task.task_id, reason)
        task = with_checked(task, self.shared.checks)
        try:
            if task.workspace is not None:
                folder = self.shared.workspaces.layer(Path(task.workspace), task.cwd or WORKSPACE_DIR)
                task = replace(task, workspace=str(folder))
        except WorkspaceError as error:
            return BadTask(task.task_id, f"its workspace cannot be used: {error}")
        try:
            return with_tests(with_hosts(task, self.shared.workspaces), self.shared.workspaces)
        except WorkspaceError as error:
            return BadTask(task.task_id, f"its tests cannot be used: {error}")

    async def make(
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
        try:
            return await self._make(task, number, epoch, executor, again, size, longest_s, longest_tokens)
        finally:
            if self.starts is not None:
                self.starts.leave(task, number)

    async def _make(
        self,
        task: Task,
        number: int,
        epoch: int,
        executor: Executor,
        again: int,
        size: int | None,
        longest_s: float,
        longest_tokens: int | None,
    ) -> Group:
        """As `make`."""
        config, seed, trial = self.config, seed_again(self.shared.seed, again), self.shared.open_now.trial
        plans = plan_group(
            task,
            number=number,
            group_size=config.env.group_size if size is None else size,
            epoch=epoch,
            seed=seed,
            sampling=config.sampling,
            agent=self.agent_spec(),
            sandbox=config.sandbox_spec(task),
            limits=config.limits,
            split=self.split,
        )
        prefix = None if self.begin is None else await self.begin(self.shared, task, number)
        plans = tuple(
            replace(plan, limits=_bounded(plan.limits, longest_s, longest_tokens), prefix=prefix) for plan in plans
        )
        if trial is not None:
            passed = trial.passed(plans[0], ids=self.hosts.takes_ids, output=self._output_rule() is not None)
            await first_of(passed, self.shared.stopping.wait())
        policy = GroupPolicy.parse(config.env.group_policy, config.env.zero_variance)
        group = await run_group(
            task, plans, executor, policy, lambda plan: backfill(plan, seed, epoch), self.branching
        )
        turn = prefix.branch.turn if prefix is not None and prefix.branch is not None else 1
        await self.settle(number, GroupResult.of(group, 0 if self.starts is None else turn))
        self.shared.agent_gate.group(group)
        return self.aged(group)

    async def settle(self, number: int, result: GroupResult = NOTHING) -> None:
        """The curriculum, if there is one, has the group's result, once it is on disk: what is drawn by it is the
        same after a kill. The first result of a group counts."""
        course = self.pools or self.starts
        if course is None or course.has(number):
            return
        choice = None if self.pools is None else self.pools.choice(number)

        async def told() -> None:
            await self.observer.result(number, result, choice)
            course.settle(number, result)

        await uninterrupted(told())

    def aged(self, group: Group) -> Group:
        """The group with each member's staleness as it is now; dropped if one is over `env.max_staleness`."""
        staleness = self.shared.policy.staleness
        members = tuple(replace(m, staleness=staleness(self._samplers(m))) for m in group.members_G)
        limit, dropped = self.config.env.max_staleness, group.dropped
        old = [m for m in members if limit is not None and m.staleness is not None and m.staleness > limit]
        if old and dropped is None:
            dropped = f"{len(old)} of {len(members)} rollouts are more than {limit} policy versions behind"
        return replace(group, members_G=members, dropped=dropped)

    def _samplers(self, member: Member) -> Sequence[PolicySpan]:
        """Which policies sampled the member's tokens that are trained on."""
        record = member.attempt.record
        if GroupFormat.of(self.config.env, None).trains_sides(member.attempt.plan.agent.kind):
            own = [turn for turn, _ in in_lines(record.turns) if not turn.inherited]
            return [span for turn in own for span in turn.completion.sampled_by]
        return sampled_by(record, member.trajectory)

    def executor(
        self, earlier: Recorded | None = None, *, tools: Mapping[str, HostTool] | None = None
    ) -> Executor:
        """An executor for this maker's plans. `tools`: in place of the run's. Only while open."""
        shared, observer = self.shared, self.observer
        scorer, tokenizer = shared.open_now.scorer, self.hosts.tokenizer

        async def graded(attempt: Attempt) -> Member | Attempt:
            return await grade(attempt, tokenizer, scorer, observer.output_folder)

        def started(plan: RolloutPlan, node: str) -> None:
            observer.started(plan, node)
            shared.costs.begun(plan)

        async def recorded(result: Member | Attempt) -> None:
            attempt = result.attempt if isinstance(result, Member) else result
            for turn in attempt.record.turns:
                shared.policy.saw_all(turn.completion.sampled_by)
            await observer.recorded(result)
            shared.agent_gate.attempt(attempt)
            shared.costs.ended(attempt)

        return Executor(
            self.hosts,
            # Rollouts of orchestrators that share hosts have the same ids: each has its own folder for files.
            provision=Provision(self._output_rule(), tools, run_folder=self.observer.run_path),
            max_retries=self.config.env.max_retries,
            graded=graded,
            recorded=recorded,
            started=started,
            earlier=lambda plan: None if earlier is None else earlier.result(plan, tokenizer),
            under_way=observer.under_way,
            served=observer.served,
            stopping=shared.stopping,
            health=self._health,
        )

    def _output_rule(self) -> OutputRule | None:
        env, folder = self.config.env, self.observer.output_folder
        if folder is None or not env.output_files:
            return None
        return OutputRule(folder, env.output_files, env.output_bytes)


# (what its run shares, its task, its number) → the recorded beginning of a group; None: it begins with its task.
Begin = Callable[[Shared, Task, int], Awaitable[Prefix | None]]


def _why_unscored(task: Task, strategy: str) -> str | None:
    """Why this strategy has nothing to go by; None: it may have."""
    if task.grader is None and strategy == GRADER:
        return "it has no grader, and --env.scoring_strategy grader scores what one finds"
    if task.grader is not None and task.answer is None and strategy in (*STRATEGIES, JUDGE):
        return "it has tests in the place of an answer: --env.scoring_strategy grader runs them"
    return None


def _bounded(limits: Limits, longest_s: float, longest_tokens: int | None) -> Limits:
    tokens = limits.max_token_length if longest_tokens is None else min(limits.max_token_length, longest_tokens)
    return replace(limits, deadline_s=min(limits.deadline_s, longest_s), max_token_length=tokens)
