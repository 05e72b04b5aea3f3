"""What an orchestrator and those beside it have in common: seed, weights, money, hosts, scorer, and their end."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from orchestrator.completion.callback import Sampler
from orchestrator.engine.builds import Builds
from orchestrator.engine.costs import Costs
from orchestrator.engine.health import AgentGate
from orchestrator.host.base import Hosts
from orchestrator.host.registry import open_hosts
from orchestrator.host.setup import HostSetup
from orchestrator.launch.workspaces import Workspaces
from orchestrator.rules.observer import Listener, Observer
from orchestrator.rules.policy import Policy
from orchestrator.rules.waits import first_error
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.open import open_scorer
from orchestrator.scorers.trial import Trial
from orchestrator.settings.config import Config
from orchestrator.tasks.checks import checks_file, read_checks
from orchestrator.telemetry import open_watchers
from orchestrator.types import BadTask, Task, TaskCheck


@dataclass(frozen=True, slots=True)
class Opened:
    """What there is while an orchestrator is open. `trial`: of a scorer that has to be tried first. `builds` None:
    no task has a sandbox of its own."""

    hosts: Hosts
    scorer: Scorer
    trial: Trial | None = None
    builds: Builds | None = None


class Shared:
    """`watchers` count what rollouts on these hosts do. `drained`: called by `drain`."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.seed = config.env.seed if config.env.seed is not None else secrets.randbits(31)
        self.policy = Policy()
        self.costs = Costs(config.openai, config.env, self._out_of_money, held=config.env.cluster == "none")
        self.agent_gate = AgentGate(say)
        self.watchers: list[Listener] = []
        self.stopping = asyncio.Event()
        self.drained: list[Callable[[], None]] = []
        self.opened: Opened | None = None
        self.workspaces = Workspaces()
        self.checks: Mapping[str, TaskCheck] = {}
        self.say = say
        self._opening: asyncio.Task[Any] | None = None

    async def open(
        self, config: Config, observer: Observer, sampler: Sampler | None, stack: AsyncExitStack
    ) -> None:
        """Checks and opens everything; `stack` closes it. A `drain` meanwhile cancels the current task: an
        endpoint may load for minutes, and nothing runs yet. Raises EnvironmentUnusable, ConfigError."""
        self._opening = asyncio.current_task()
        try:
            self.checks = await asyncio.to_thread(read_checks, checks_file(config.env.dataset))
            self.watchers = await open_watchers(
                config.env, config.openai[0].model_name, self._open_hosts, stack, observer
            )
            for watcher in self.watchers:  # from now on: an endpoint may be waited for
                observer.listeners.append(watcher)
                stack.callback(observer.listeners.remove, watcher)
            async with asyncio.TaskGroup() as meanwhile:  # the judge's endpoint may be waited for
                scorer = await open_scorer(
                    config.env, config.judge_api_key, config.startup_timeout, stack, observer.say, meanwhile
                )
                setup = HostSetup(
                    config,
                    observer.notes,
                    observer.say,
                    on_node=observer.node,
                    policy=self.policy,
                    sampler=sampler,
                    cost_limit=self.costs.cost_limit,
                )
                hosts = await open_hosts(setup, stack)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self._opening = None
        builds = Builds(config.env, config.sandbox_spec, hosts.why_unfit, observer.say)
        stack.push_async_callback(builds.aclose)
        self.opened = Opened(hosts, scorer, Trial.of(scorer), builds)
        stack.callback(self._close)

    def _close(self) -> None:
        self.opened = None
        self.workspaces.close()

    def _open_hosts(self) -> Hosts | None:
        return None if self.opened is None else self.opened.hosts

    @property
    def open_now(self) -> Opened:
        """Raises RuntimeError unless it is open."""
        if self.opened is None:
            raise RuntimeError("the orchestrator is not open: use `async with Orchestrator(config)`")
        return self.opened

    def built(self, task: Task) -> Future[Task | BadTask]:
        """As `Builds.begin`. Only while open."""
        builds = self.open_now.builds
        assert builds is not None, "tests that open an engine by hand have no such tasks"
        return builds.begin(task)

    def drain(self) -> None:
        """No rollout is begun any more; those that run come to their end."""
        self.stopping.set()
        for call in self.drained:
            call()
        if self.opened is not None:
            self.opened.hosts.drain()
            if self.opened.builds is not None:
                self.opened.builds.stop()
        elif self._opening is not None:
            self._opening.cancel()

    def _out_of_money(self) -> None:
        self.say("env.max_cost: no rollout is begun any more; those under way come to their end")
        self.drain()
