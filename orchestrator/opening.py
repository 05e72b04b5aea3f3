"""Opens the hosts of a run, what rollouts on one share, and the scorer. Checks all of it before a task is read."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from orchestrator.agents.equip import brought_host_tools, check_team, equip
from orchestrator.agents.equipment import Equipment
from orchestrator.breaker import Breaker
from orchestrator.completion.base import Completer, Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect, one_answers
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.http import HttpClient
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.completion.route import LimitedCompleter, RoutedCompleter
from orchestrator.completion.tokenizer import HubTokenizer, check_source, load_tokenizer
from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable, RolloutError
from orchestrator.here import Here
from orchestrator.hosts import Hosts
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.parked import ParkedSandbox, parked_sandbox
from orchestrator.plugins import PREFIX
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
    from orchestrator.settings.table import EnvSettings, OpenAISettings

log = logging.getLogger(__name__)

T = TypeVar("T")
REPLAY = "replay:"
JUDGE = "judge"
FALLBACK_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"  # the predecessor's default


async def open_hosts(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    tell: Callable[[str, str | None], None] = lambda node, away: None,
) -> Hosts:
    """This machine, or the nodes of a cluster; `stack` closes them. Raises ConfigError, EnvironmentUnusable.

    `say` is told when something goes away and comes back. `tell`: a node works (None), or why rollouts do not go
    there.
    """
    if config.env.cluster == "ray":
        from orchestrator.cluster.nodes import open_nodes

        return await open_nodes(config, stack, notes, say, tell)
    return await open_here(config, stack, notes, say)


async def open_here(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    equipment: Equipment | None = None,
) -> Here:
    """As `open_hosts`, for this machine. `equipment`: read elsewhere, from files that may not be here."""
    around = await open_surroundings(config, stack, notes, say, equipment)
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
) -> Surroundings:
    """Opens Docker, image, tokenizer, endpoint, tools; `stack` closes them. Raises EnvironmentUnusable.

    `say` is told when Docker goes away and comes back.
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
    docker = Breaker("Docker", lambda: launcher.ready(config.sandbox_spec()), say)
    # The pool makes its first sandboxes while the tokenizer loads.
    pool = await stack.enter_async_context(_pool(config, launcher, channel_directory, docker))
    tokenizer = await asyncio.to_thread(find_tokenizer, config)
    completer = await _completer(config, tokenizer, stack, notes)
    sampled = [endpoint(config.env, server) for server in config.openai if not server.base_url.startswith(REPLAY)]
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
    )


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
    EnvironmentUnusable."""
    name = config.env.tokenizer_name
    if name is not None:
        return None if name.lower() == "none" else load_tokenizer(name, config.env.chat_template_kwargs)
    return _first_usable(config, lambda candidate: load_tokenizer(candidate, config.env.chat_template_kwargs))


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


async def _completer(
    config: Config, tokenizer: HubTokenizer | None, stack: AsyncExitStack, notes: list[str]
) -> Completer:
    completers: list[Completer] = []
    for server in config.openai:
        if server.base_url.startswith(REPLAY):
            recorded = Path(server.base_url.removeprefix(REPLAY))
            completers.append(await asyncio.to_thread(ReplayCompleter.open, recorded))
            continue
        completer = await connect(
            endpoint(config.env, server),
            tokenizer,
            server_type=server.server_type,
            tokens=config.env.token_source,
            temperature=config.env.temperature,
            notes=notes,
        )
        stack.push_async_callback(completer.aclose)
        completers.append(
            LimitedCompleter(
                completer, training=server.num_max_requests_at_once, evaluation=server.num_requests_for_eval
            )
        )
    if len({completer.takes_ids for completer in completers}) > 1:
        raise EnvironmentUnusable(
            "some of the endpoints give token ids and some do not; "
            "set --env.token_source retokenize or use one kind of server"
        )
    weights = [server.weight for server in config.openai]
    return completers[0] if len(completers) == 1 else RoutedCompleter(completers, weights)


def endpoint(env: EnvSettings, server: OpenAISettings) -> Endpoint:
    """The endpoint of this server's settings."""
    root = openai_root(server.base_url)
    return Endpoint(
        root,
        server.model_name,
        server.key(),
        server.timeout,
        chat_extras=_chat_extras(env, root),
        takes_n=not server.n_kwarg_is_ignored,
    )


def _chat_extras(env: EnvSettings, root: str) -> dict[str, Any]:
    """Fields the operator's settings add to a chat request. Raises EnvironmentUnusable.

    Reasoning is asked for as Atropos does: by `reasoning_effort` at OpenAI, by `reasoning` at other services.
    """
    extras: dict[str, Any] = {}
    if env.chat_template_kwargs is not None:
        extras["chat_template_kwargs"] = dict(env.chat_template_kwargs)
    effort, most = env.reasoning_effort, env.max_reasoning_tokens
    if not env.thinking_mode and effort is None and most is None:
        return extras
    if (urlsplit(root).hostname or "").endswith(("openai.com", "openai.azure.com")):
        if most is not None:
            raise EnvironmentUnusable("env.max_reasoning_tokens: OpenAI takes none; set env.reasoning_effort")
        return {**extras, "reasoning_effort": effort or "medium"}
    asked = {"effort": effort, "max_tokens": most}
    named = {name: value for name, value in asked.items() if value is not None}
    return {**extras, "reasoning": {"enabled": effort != "none", **named}}


def openai_root(address: str) -> str:
    """The base URL; `/v1` is added to an address without a path."""
    root = address.rstrip("/")
    return root if urlsplit(root).path else f"{root}/v1"


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

    if not docker:
        await asyncio.to_thread(reap_directories)
        return
    try:
        reaped = await reap()
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
    if env.launcher == "docker":
        from orchestrator.launch.docker.launcher import DockerLauncher

        waived = frozenset(env.waive_hardening)
        if waived:
            notes.append(f"not demanded of sandboxes, as you asked: {', '.join(sorted(waived))}")
        launcher: Launcher = DockerLauncher(
            run_id,
            max_sandboxes=sandboxes,
            waived=waived,
            allow_localhost_tcp=env.needs_localhost_tcp,
            advise=notes.append,
        )
    else:
        from orchestrator.launch.process import ProcessLauncher

        launcher = ProcessLauncher(run_id, max_sandboxes=sandboxes)
    stack.push_async_callback(launcher.aclose)
    # Not in a thread: cancelled there, the directory would be made and never removed.
    channels = stack.enter_context(Channels(run_id))
    return launcher, channels.directory


async def open_scorer(config: Config, stack: AsyncExitStack) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable."""
    env = config.env
    if env.scoring_strategy.startswith(PREFIX):
        return await _controlled(env.scoring_strategy, env, stack)
    ours = "correctness" if env.scoring_strategy == JUDGE else env.scoring_strategy
    rules = await _controlled(StrategyScorer(ours, env.length_penalty_weight, env.combined_weights), env, stack)
    if env.scoring_strategy == JUDGE:
        return await _judge(config, rules, stack)
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


async def _judge(config: Config, rules: Scorer, stack: AsyncExitStack) -> Scorer:
    env = config.env
    if env.judge_base_url is None or env.judge_model_name is None:
        raise ConfigError(
            "env.scoring_strategy judge needs --env.judge_base_url URL and --env.judge_model_name NAME"
        )
    key = config.judge_api_key.reveal()
    judge = Endpoint(openai_root(env.judge_base_url), env.judge_model_name, key, env.scorer_timeout)
    completer = ChatCompleter(HttpClient(judge))
    stack.push_async_callback(completer.aclose)
    if not judge.hosted:
        try:
            await completer.probe()
        except EnvironmentUnusable as error:
            raise EnvironmentUnusable(f"env.judge_base_url: {error}; the judge's key is JUDGE_API_KEY") from error
    return JudgeScorer(completer, rules, model=env.judge_model_name, max_tokens=env.judge_max_tokens)
