"""Opens this machine as the host of a run, and checks everything that rollouts on it share before a task is
read."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path

from orchestrator.agents.equip import brought_host_tools, check_team, equip
from orchestrator.completion.base import Completer
from orchestrator.completion.callback import CallbackCompleter
from orchestrator.completion.connect import one_answers
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.endpoints import open_completer
from orchestrator.completion.find_tokenizer import check_tokenizer, find_tokenizer
from orchestrator.completion.startup import wait_sayer
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import DockerError, EnvironmentUnusable, RolloutError
from orchestrator.host.breaker import Breaker
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.host.local import LocalHost
from orchestrator.host.needs import HostNeeds, completion_needs
from orchestrator.host.resources import Resources
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.make import make_launcher
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.tools.base import HostTool
from orchestrator.tools.brought import demand_tool_names
from orchestrator.tools.functions import Workers
from orchestrator.types import FailedName, SandboxSpec


async def open_local(needs: HostNeeds, stack: AsyncExitStack) -> LocalHost:
    """Opens launcher, image, tokenizer, endpoint and tools of this machine; `stack` closes them. Raises
    ConfigError, EnvironmentUnusable."""
    config, notes = needs.config, needs.notes
    env, spec = config.env, config.sandbox_spec()
    equipment = await asyncio.to_thread(equip, env) if needs.equipment is None else needs.equipment
    tools = await _host_tools(config, stack)
    check_team(env.managed_agents, equipment, tools)
    kind = await launcher_kind(env, notes)
    launcher, channel_directory = _launcher(env, kind, stack, notes)
    await _check_launcher(launcher, spec)
    await _remove_leftovers(notes, docker=kind in ("docker", "auto"))
    await asyncio.to_thread(check_tokenizer, env.tokenizer_name, config.openai[0].model_name)
    service = "the OCI runtime" if kind == "oci" else "Docker"
    breaker = Breaker(service, lambda: launcher.ready(spec), needs.say)
    # The pool makes its first sandboxes while the tokenizer loads.
    pool = await stack.enter_async_context(_pool(config, launcher, channel_directory, breaker))
    tokenizer = await asyncio.to_thread(find_tokenizer, env, config.openai[0].model_name)
    # Last, as it may take minutes: what fails at once has failed by now.
    completer, why_text = await _completer(needs, tokenizer, stack)
    resources = Resources(
        launcher,
        completer,
        tokenizer,
        channel_directory,
        tools,
        pool=pool,
        equipment=equipment,
        control=EndpointControl(completer, tokenizer),
        why_text=why_text,
        purse=needs.purse,
    )
    return LocalHost(
        resources,
        spec,
        max_sandboxes=env.max_concurrent_sandboxes,
        warm=env.most_warm,
        breakers={
            FailedName.DOCKER_ERROR: breaker,
            FailedName.LAUNCH_ERROR: breaker,
            FailedName.SANDBOX_LOST: breaker,
            FailedName.LLM_ERROR: Breaker("the inference endpoint", _endpoint_question(needs), needs.say),
        },
    )


async def _completer(
    needs: HostNeeds, tokenizer: HubTokenizer | None, stack: AsyncExitStack
) -> tuple[Completer, str]:
    """(the completer, why it asks for text; empty: it asks for ids)."""
    config = needs.config
    if needs.sampler is None:
        wait = needs.on_wait or wait_sayer(needs.say)
        return await open_completer(completion_needs(config), tokenizer, stack, needs.notes, wait, needs.policy)
    assert tokenizer is not None  # the registry has refused a sampler without one
    needs.notes.append("completions are sampled by the program itself")
    server = config.openai[0]
    return CallbackCompleter(
        needs.sampler, tokenizer, model=server.model_name, timeout_s=server.timeout, policy=needs.policy
    ), ""


def _endpoint_question(needs: HostNeeds) -> Callable[[], Awaitable[None]]:
    """Asks the run's endpoints without sampling. A program that samples itself, and a recording, are never
    away."""
    endpoints = completion_needs(needs.config).endpoints() if needs.sampler is None else []
    return lambda: one_answers(endpoints)


def _pool(
    config: Config,
    launcher: Launcher,
    channel_directory: Callable[[], AbstractContextManager[Path]],
    breaker: Breaker,
) -> WarmPool[ParkedSandbox]:
    """The pool that all sandboxes of a run come from."""
    env, ramp = config.env, Ramp()

    def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        return parked_sandbox(spec, launcher, channel_directory, ramp)

    async def recovered() -> None:
        await breaker.away()
        await breaker.passed()

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


async def _host_tools(config: Config, stack: AsyncExitStack) -> dict[str, HostTool]:
    """The web tools and the operator's own, by name. Raises ConfigError."""
    env = config.env
    workers = Workers(env.tool_timeout, env.max_concurrent_tool_calls)
    own = await asyncio.to_thread(brought_host_tools, env.host_tools, workers)
    web = _web_tools(config, stack)
    demand_tool_names(web, own)
    return {**web, **own}


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


def _launcher(
    env: EnvSettings, kind: str, stack: AsyncExitStack, notes: list[str]
) -> tuple[Launcher, Callable[[], AbstractContextManager[Path]]]:
    """(launcher, maker of the directories of sandboxes' sockets)."""
    sandboxes = env.max_concurrent_sandboxes + env.most_warm
    if note := make_room(sandboxes):
        notes.append(note)
    run_id = secrets.token_hex(8)
    if env.waive_hardening:
        notes.append(f"not demanded of sandboxes, as you asked: {', '.join(sorted(env.waive_hardening))}")
    launcher = make_launcher(
        kind,
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
