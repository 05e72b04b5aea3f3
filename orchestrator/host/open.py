"""Opens this machine as the host of a run, and checks everything that rollouts on it share before a task is
read."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path

from orchestrator.agents.equip import check_team, equip, operator_host_tools
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
from orchestrator.host.egress import open_egress
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.host.local import LocalHost
from orchestrator.host.resources import Resources
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.host.setup import HostSetup, completion_needs
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.make import make_launcher
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.rules.redact import Secret
from orchestrator.services.control import ServiceControl
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.settings.tools import ToolSettings
from orchestrator.tools.base import RESERVED, HostTool
from orchestrator.tools.functions import Workers
from orchestrator.tools.mcp.tools import defuse, open_servers
from orchestrator.tools.operator_tools import demand_tool_names
from orchestrator.types import FailedName, SandboxSpec


async def open_local(setup: HostSetup, stack: AsyncExitStack) -> LocalHost:
    """Opens launcher, image, tokenizer, endpoint and tools of this machine; `stack` closes them. Raises
    ConfigError, EnvironmentUnusable."""
    config, notes = setup.config, setup.notes
    env, spec = config.env, config.sandbox_spec()
    equipment = await asyncio.to_thread(equip, env) if setup.equipment is None else setup.equipment
    workers = Workers(env.tool_timeout, env.max_concurrent_tool_calls)
    own = await asyncio.to_thread(operator_host_tools, env.host_tools, workers)
    # A shell agent has one tool, and that is the sandbox's.
    web = {} if env.agent_kind == "shell" else _web_tools(env, config.tavily_api_key, stack)
    demand_tool_names(web, own)
    served = await open_servers(
        env.mcp_servers,
        {*RESERVED, *web, *own, *(tool.name for tool in equipment.sandbox_tools)},
        stack,
        notes,
        timeout_s=env.tool_timeout,
        max_calls=env.max_concurrent_tool_calls,
        fail_rollouts=env.fail_on_tool_error,
    )
    tools = {**web, **own, **served}
    check_team(env.managed_agents, equipment, tools)
    kind = await launcher_kind(env, notes)
    launcher, channel_directory = _launcher(
        env, kind, stack, notes, localhost_tcp=env.needs_localhost_tcp, graders=env.most_grading
    )
    await _check_launcher(launcher, spec)
    await _remove_leftovers(notes, docker=kind in ("docker", "auto"))
    await asyncio.to_thread(check_tokenizer, env.tokenizer_name, config.openai[0].model_name)
    service = "the OCI runtime" if kind == "oci" else "Docker"
    breaker = Breaker(service, lambda: launcher.ready(spec), setup.say)
    # The pool makes its first sandboxes while the tokenizer loads.
    # A resumed run may have nothing left to do: no sandbox is made ahead.
    head_start = 0 if env.resume else env.max_concurrent_sandboxes
    if env.total_steps > 0:
        head_start = min(head_start, env.total_steps * env.group_size)
    pool = await stack.enter_async_context(_pool(env, spec, launcher, channel_directory, breaker, head_start))
    tokenizer = await asyncio.to_thread(find_tokenizer, env, config.openai[0].model_name)
    if tokenizer is not None:
        defuse(served, tokenizer.spells_control)
    # Last, as it may take minutes: what fails at once has failed by now.
    completer, why_text = await _completer(setup, tokenizer, stack)
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
        cost_limit=setup.cost_limit,
        world=await asyncio.to_thread(open_egress, env),
        service_control=ServiceControl(launcher),
    )
    return LocalHost(
        resources,
        spec,
        max_sandboxes=env.max_concurrent_sandboxes,
        warm=env.most_warm,
        graders=env.most_grading,
        breakers={
            FailedName.DOCKER_ERROR: breaker,
            FailedName.LAUNCH_ERROR: breaker,
            FailedName.SANDBOX_LOST: breaker,
            FailedName.LLM_ERROR: Breaker("the inference endpoint", _endpoint_question(setup), setup.say),
        },
    )


async def _completer(
    setup: HostSetup, tokenizer: HubTokenizer | None, stack: AsyncExitStack
) -> tuple[Completer, str]:
    """(the completer, why it asks for text; empty: it asks for ids)."""
    config = setup.config
    if setup.sampler is None:
        wait = setup.on_wait or wait_sayer(setup.say)
        return await open_completer(completion_needs(config), tokenizer, stack, setup.notes, wait, setup.policy)
    assert tokenizer is not None  # the registry has refused a sampler without one
    setup.notes.append("completions are sampled by the program itself")
    server = config.openai[0]
    return CallbackCompleter(
        setup.sampler, tokenizer, model=server.model_name, timeout_s=server.timeout, policy=setup.policy
    ), ""


def _endpoint_question(setup: HostSetup) -> Callable[[], Awaitable[None]]:
    """Asks the run's endpoints without sampling. A program that samples itself, and a recording, are never
    away."""
    endpoints = completion_needs(setup.config).endpoints() if setup.sampler is None else []
    return lambda: one_answers(endpoints)


def _pool(
    settings: SandboxSettings,
    spec: SandboxSpec,
    launcher: Launcher,
    channel_directory: Callable[[], AbstractContextManager[Path]],
    breaker: Breaker,
    head_start: int,
) -> WarmPool[ParkedSandbox]:
    """The pool that all sandboxes of a run come from."""
    ramp = Ramp()

    def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        return parked_sandbox(spec, launcher, channel_directory, ramp)

    async def recovered() -> None:
        await breaker.away()
        await breaker.passed()

    return WarmPool(
        park,
        spec,
        leased=settings.max_concurrent_sandboxes,
        warm=settings.most_warm,
        head_start=head_start,
        recovered=recovered,
    )


def _web_tools(settings: ToolSettings, key: Secret, stack: AsyncExitStack) -> Mapping[str, HostTool]:
    """The web tools; empty without a key."""
    if not key:
        return {}
    from orchestrator.tools.rules import WebRules
    from orchestrator.tools.tavily import Tavily
    from orchestrator.tools.web import web_tools

    service = Tavily(
        key,
        base_url=settings.tavily_base_url,
        timeout_s=settings.tool_timeout,
        max_calls=settings.max_concurrent_tool_calls,
    )
    stack.push_async_callback(service.aclose)
    rules = WebRules(settings.web_deny_hosts, settings.web_deny_words)
    return web_tools(service, rules, fail_rollouts=settings.fail_on_tool_error)


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
    settings: SandboxSettings,
    kind: str,
    stack: AsyncExitStack,
    notes: list[str],
    *,
    localhost_tcp: bool,
    graders: int,
) -> tuple[Launcher, Callable[[], AbstractContextManager[Path]]]:
    """(launcher, maker of the directories of sandboxes' sockets)."""
    sandboxes = settings.max_concurrent_sandboxes + settings.most_warm + graders
    if note := make_room(sandboxes):
        notes.append(note)
    run_id = secrets.token_hex(8)
    if settings.waive_hardening:
        notes.append(f"not demanded of sandboxes, as you asked: {', '.join(sorted(settings.waive_hardening))}")
    launcher = make_launcher(
        kind,
        run_id,
        max_sandboxes=sandboxes,
        waived=frozenset(settings.waive_hardening),
        allow_localhost_tcp=localhost_tcp,
        oci_runtime=settings.oci_runtime,
        start=settings.start,
        advise=notes.append,
    )
    stack.push_async_callback(launcher.aclose)
    # Not in a thread: cancelled there, the directory would be made and never removed.
    channels = stack.enter_context(Channels(run_id))
    return launcher, channels.directory
