"""Opens the hosts of a run, what rollouts on one share, and the scorer. Checks all of it before a task is read."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.agents.equip import brought_host_tools, check_team, equip
from orchestrator.agents.equipment import Equipment
from orchestrator.completion.base import Completer
from orchestrator.completion.called import CalledCompleter, Sampler
from orchestrator.completion.connect import one_answers
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.endpoints import REPLAY, endpoint, open_completer
from orchestrator.completion.find_tokenizer import check_tokenizer, find_tokenizer
from orchestrator.completion.startup import Wait, said
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable, RolloutError
from orchestrator.host.base import Hosts
from orchestrator.host.breaker import Breaker
from orchestrator.host.local import LocalHost
from orchestrator.host.resources import Resources
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.make import make_launcher
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.rules.policy import Policy
from orchestrator.rules.purse import Purse
from orchestrator.tools.base import HostTool
from orchestrator.tools.brought import demand_tool_names
from orchestrator.types import SandboxSpec

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

log = logging.getLogger(__name__)


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
) -> LocalHost:
    """As `open_hosts`, for this machine. `equipment`: read elsewhere, from files that may not be here. `tell` is
    told of waits for an endpoint, in the place of `say`."""
    around = await open_resources(config, stack, notes, say, equipment, policy, tell, sampler, purse)
    return LocalHost.with_breakers(
        around,
        config.sandbox_spec(),
        max_sandboxes=config.env.max_concurrent_sandboxes,
        warm=config.env.most_warm,
        say=say,
    )


async def open_resources(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    equipment: Equipment | None = None,
    policy: Policy | None = None,
    tell: Callable[[Wait], None] | None = None,
    sampler: Sampler | None = None,
    purse: Purse | None = None,
) -> Resources:
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
    await asyncio.to_thread(check_tokenizer, config)
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
    return Resources(
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
