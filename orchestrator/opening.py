"""Opens the hosts of a run, what rollouts on one share, and the scorer. Checks all of it before a task is read."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orchestrator.agents.equip import brought_host_tools, check_team, equip
from orchestrator.agents.equipment import Equipment
from orchestrator.breaker import Breaker
from orchestrator.completion.base import Completer, Endpoint
from orchestrator.completion.called import CalledCompleter, Sampler
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import one_answers
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.http import HttpClient
from orchestrator.completion.startup import Patience, Wait, said
from orchestrator.completion.tokenizer import HubTokenizer, check_source, load_tokenizer
from orchestrator.endpoints import REPLAY, endpoint, judge_serves, open_completer, openai_root
from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable, RolloutError
from orchestrator.here import Here
from orchestrator.hosts import Hosts
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.make import make_launcher
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.parked import ParkedSandbox, parked_sandbox
from orchestrator.plugins import PREFIX
from orchestrator.policy import Policy
from orchestrator.purse import Purse
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.scorers.judge import JudgeScorer
from orchestrator.scorers.processes import GradingProcesses
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.surroundings import Surroundings
from orchestrator.tools.base import HostTool
from orchestrator.tools.brought import demand_tool_names
from orchestrator.types import Ended, Record, RolloutPlan, SandboxSpec, Score

if TYPE_CHECKING:
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import EnvSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
JUDGE = "judge"
FALLBACK_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"  # the predecessor's default


async def open_hosts(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    tell: Callable[[str, str | None], None] = lambda node, away: None,
    policy: Policy | None = None,
    sampler: Sampler | None = None,
    purse: Purse | None = None,
) -> Hosts:
    """This machine, or the nodes of a cluster; `stack` closes them. Raises ConfigError, EnvironmentUnusable.

    `say` is told when something goes away and comes back. `tell`: a node works (None), or why rollouts do not go
    there. `policy`: what a trainer says it serves. `sampler`: samples in the place of the endpoints. `purse`: for
    completions sampled on this machine.
    """
    policy = policy or Policy()
    if sampler is not None:
        _check_called(config)
    if config.env.cluster == "ray":
        from orchestrator.cluster.nodes import open_nodes

        return await open_nodes(config, stack, notes, say, tell, policy)
    return await open_here(config, stack, notes, say, policy=policy, sampler=sampler, purse=purse)


async def open_here(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    equipment: Equipment | None = None,
    policy: Policy | None = None,
    tell: Callable[[Wait], None] | None = None,
    sampler: Sampler | None = None,
    purse: Purse | None = None,
) -> Here:
    """As `open_hosts`, for this machine. `equipment`: read elsewhere, from files that may not be here. `tell` is
    told of waits for an endpoint, in the place of `say`."""
    around = await open_surroundings(config, stack, notes, say, equipment, policy, tell, sampler, purse)
    return Here.with_breakers(
        around,
        config.sandbox_spec(),
        max_sandboxes=config.env.max_concurrent_sandboxes,
        warm=config.env.most_warm,
        say=say,
    )


async def open_surroundings(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    equipment: Equipment | None = None,
    policy: Policy | None = None,
    tell: Callable[[Wait], None] | None = None,
    sampler: Sampler | None = None,
    purse: Purse | None = None,
) -> Surroundings:
    """Opens Docker, image, tokenizer, endpoint, tools; `stack` closes them. Raises EnvironmentUnusable.

    `say` is told when Docker goes away and comes back, and of waits for an endpoint, unless `tell` is.
    """
    if equipment is None:
        equipment = await asyncio.to_thread(equip, config.env)
    own_tools = await asyncio.to_thread(brought_host_tools, config.env)
    tools = _web_tools(config, stack)
    demand_tool_names(tools, own_tools)
    tools = {**tools, **own_tools}
    check_team(config.env, equipment, tools)
    launcher, channel_directory = await _launcher(config, stack, notes)
    await _check_launcher(launcher, config.sandbox_spec())
    await _remove_leftovers(notes, docker=config.env.launcher == "docker")
    await asyncio.to_thread(_check_tokenizer, config)
    what = "the OCI runtime" if config.env.launcher == "oci" else "Docker"
    docker = Breaker(what, lambda: launcher.ready(config.sandbox_spec()), say)
    # The pool makes its first sandboxes while the tokenizer loads.
    pool = await stack.enter_async_context(_pool(config, launcher, channel_directory, docker))
    tokenizer = await asyncio.to_thread(find_tokenizer, config)
    # Last, as it may take minutes: what fails at once has failed by now.
    policy, tell = policy or Policy(), tell or said(say)
    if sampler is None:
        completer, why_text = await open_completer(config, tokenizer, stack, notes, tell, policy)
    else:
        completer, why_text = _called(sampler, config, tokenizer, notes, policy), ""
    servers = config.openai if sampler is None else ()
    sampled = [endpoint(config.env, server) for server in servers if not server.base_url.startswith(REPLAY)]
    return Surroundings(
        launcher,
        completer,
        tokenizer,
        channel_directory,
        tools,
        lambda: one_answers(sampled),
        docker,
        pool,
        equipment,
        control=EndpointControl(completer, tokenizer),
        why_text=why_text,
        purse=purse,
    )


def _check_called(config: Config) -> None:
    """Raises ConfigError for settings that do not go with completions of the program itself."""
    if any(server.base_url for server in config.openai):
        raise ConfigError("openai.base_url: the program samples the completions itself; leave it out")
    if config.env.cluster != "none":
        raise ConfigError("env.cluster: the program samples in this process; leave it at none")
    if config.env.token_source == "retokenize" or (config.env.tokenizer_name or "").lower() == "none":
        raise ConfigError("env.tokenizer_name: the program samples ids; name the tokenizer that they are of")


def _called(
    sampler: Sampler, config: Config, tokenizer: HubTokenizer | None, notes: list[str], policy: Policy
) -> Completer:
    assert tokenizer is not None  # see `_check_called`
    notes.append("completions are sampled by the program itself")
    server = config.openai[0]
    return CalledCompleter(sampler, tokenizer, model=server.model_name, timeout_s=server.timeout, policy=policy)


def _pool(
    config: Config,
    launcher: Launcher,
    channel_directory: Callable[[], AbstractContextManager[Path]],
    docker: Breaker,
) -> WarmPool[ParkedSandbox]:
    """The pool that all sandboxes of a run come from."""
    env, ramp = config.env, Ramp()

    def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        return parked_sandbox(spec, launcher, channel_directory, ramp)

    async def recovered() -> None:
        await docker.away()
        await docker.passed()

    # A resumed run may have nothing left to do: no sandbox is made ahead.
    rollouts = 0 if env.resume else env.max_concurrent_sandboxes
    if env.total_steps > 0:
        rollouts = min(rollouts, env.total_steps * env.group_size)
    return WarmPool(
        park,
        config.sandbox_spec(),
        leased=env.max_concurrent_sandboxes,
        warm=env.most_warm,
        head_start=rollouts,
        recovered=recovered,
    )


def _web_tools(config: Config, stack: AsyncExitStack) -> Mapping[str, HostTool]:
    """The web tools; empty without a key, and for programs: an agent is not told of tools it cannot use."""
    if not config.tavily_api_key or config.env.agent_kind == "program":
        return {}
    from orchestrator.tools.rules import WebRules
    from orchestrator.tools.tavily import Tavily
    from orchestrator.tools.web import web_tools

    env = config.env
    service = Tavily(
        config.tavily_api_key,
        base_url=env.tavily_base_url,
        timeout_s=env.tool_timeout,
        max_calls=env.max_concurrent_tool_calls,
    )
    stack.push_async_callback(service.aclose)
    rules = WebRules(env.web_deny_hosts, env.web_deny_words)
    return web_tools(service, rules, fail_rollouts=env.fail_on_tool_error)


def find_tokenizer(config: Config) -> HubTokenizer | None:
    """The tokenizer that was asked for; else the model's own if it loads, else FALLBACK_TOKENIZER. Blocks. Raises
    EnvironmentUnusable, also for a chat template that cannot show a conversation."""
    name = config.env.tokenizer_name
    if name is not None and name.lower() == "none":
        return None
    found = _loaded(name, config) if name is not None else _first_usable(config, partial(_loaded, config=config))
    found.demand_usable()
    return found


def _loaded(name: str, config: Config) -> HubTokenizer:
    env = config.env
    return load_tokenizer(name, env.chat_template_kwargs, call_format=env.named_call_format)


def _check_tokenizer(config: Config) -> None:
    """Raises EnvironmentUnusable if the name, or a look into the folder, shows that no tokenizer can be loaded.
    A cheap check, made before sandboxes are."""
    name = config.env.tokenizer_name
    if name is None:
        _first_usable(config, check_source)
    elif name.lower() != "none":
        check_source(name)


def _first_usable(config: Config, use: Callable[[str], T]) -> T:
    candidates = (config.openai[0].model_name, FALLBACK_TOKENIZER)
    for candidate in candidates:
        try:
            return use(candidate)
        except EnvironmentUnusable as error:
            log.debug("%s", error)
    raise EnvironmentUnusable(
        f"no tokenizer: neither {' nor '.join(candidates)} is on this machine or can be had from the hub; set "
        "--env.tokenizer_name to the model's folder or hub id, or to none for `process` without token ids"
    )


async def _check_launcher(launcher: Launcher, spec: SandboxSpec) -> None:
    """Raises EnvironmentUnusable if no sandbox could be made. `check` alone would not notice failing storage."""
    await launcher.check(spec)
    try:
        await launcher.ready(spec)
    except RolloutError as error:
        raise EnvironmentUnusable(str(error)) from error


async def _remove_leftovers(notes: list[str], *, docker: bool) -> None:
    """Removes what killed runs left. Leftovers that cannot be removed do not stop this run."""
    from orchestrator.launch.reaper import reap, reap_directories

    try:
        reaped = await reap() if docker else await asyncio.to_thread(reap_directories)
    except DockerError as error:
        raise EnvironmentUnusable(str(error)) from error
    if reaped.containers or reaped.directories:
        notes.append(f"removed {reaped.containers} containers and {reaped.directories} directories of dead runs")


async def _launcher(
    config: Config, stack: AsyncExitStack, notes: list[str]
) -> tuple[Launcher, Callable[[], AbstractContextManager[Path]]]:
    """(launcher, maker of the directories of sandboxes' sockets)."""
    env = config.env
    sandboxes = env.max_concurrent_sandboxes + env.most_warm
    if note := make_room(sandboxes):
        notes.append(note)
    run_id = secrets.token_hex(8)
    if env.waive_hardening:
        notes.append(f"not demanded of sandboxes, as you asked: {', '.join(sorted(env.waive_hardening))}")
    launcher = make_launcher(
        env.launcher,
        run_id,
        max_sandboxes=sandboxes,
        waived=frozenset(env.waive_hardening),
        allow_localhost_tcp=env.needs_localhost_tcp,
        oci_runtime=env.oci_runtime,
        advise=notes.append,
    )
    stack.push_async_callback(launcher.aclose)
    # Not in a thread: cancelled there, the directory would be made and never removed.
    channels = stack.enter_context(Channels(run_id))
    return launcher, channels.directory


async def open_scorer(
    config: Config,
    stack: AsyncExitStack,
    say: Callable[[str], None] = log.warning,
    meanwhile: asyncio.TaskGroup | None = None,
) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable.

    `say` is told of a wait for the judge's endpoint. `meanwhile`: where that wait goes on; None: it is over when
    this returns.
    """
    env = config.env
    if env.scoring_strategy.startswith(PREFIX):
        return await _controlled(env.scoring_strategy, env, stack)
    ours = "correctness" if env.scoring_strategy == JUDGE else env.scoring_strategy
    rules = await _controlled(StrategyScorer(ours, env.length_penalty_weight, env.combined_weights), env, stack)
    if env.scoring_strategy == JUDGE:
        return await _judge(config, rules, stack, say, meanwhile)
    return _LoggedScorer(rules, ours) if env.debug_scoring else rules


async def _controlled(scorer: StrategyScorer | str, env: EnvSettings, stack: AsyncExitStack) -> ControlledScorer:
    """The scorer in processes of its own. A rollout at which one of our strategies fails counts as wrong."""
    processes = GradingProcesses(scorer, env.scorer_timeout)
    stack.push_async_callback(processes.aclose)
    await processes.open()
    return ControlledScorer(processes, {} if isinstance(scorer, str) else {"correctness": 0.0})


@dataclass(frozen=True, slots=True)
class _LoggedScorer:
    """Logs every part of every score, for `env.debug_scoring`."""

    scorer: Scorer
    name: str

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """The scorer's own score."""
        score = await self.scorer.score(plan, record, ended)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in score.parts.items())
        log.info("%s: %s %.4f (%s)", plan.rollout_id, self.name, score.value, shown)
        return score


async def _judge(
    config: Config,
    rules: Scorer,
    stack: AsyncExitStack,
    say: Callable[[str], None],
    meanwhile: asyncio.TaskGroup | None,
) -> Scorer:
    env = config.env
    if env.judge_base_url is None or env.judge_model_name is None:
        raise ConfigError(
            "env.scoring_strategy judge needs --env.judge_base_url URL and --env.judge_model_name NAME"
        )
    key = config.judge_api_key.reveal()
    judge = Endpoint(openai_root(env.judge_base_url), env.judge_model_name, key, env.scorer_timeout)
    completer = ChatCompleter(HttpClient(judge), strict=False)
    stack.push_async_callback(completer.aclose)
    if not judge.hosted:
        # The judge is as likely to be loading as the models that are judged.
        timeout_s = max(server.startup_timeout for server in config.openai)
        serves = judge_serves(completer, Patience(timeout_s, said(say)))
        if meanwhile is None:
            await serves
        else:
            meanwhile.create_task(serves, name="judge")
    return JudgeScorer(completer, rules, model=env.judge_model_name, max_tokens=env.judge_max_tokens)
