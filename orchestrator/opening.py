"""Opens what every rollout of a run shares, each thing checked before any task is touched."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from orchestrator.agents.equip import brought_host_tools, check_team, equip
from orchestrator.breaker import Breaker
from orchestrator.completion.base import Completer, Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.limits import LimitedCompleter
from orchestrator.completion.presence import one_answers
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.completion.route import RoutedCompleter
from orchestrator.completion.tokenizer import HubTokenizer, check_source, load_tokenizer
from orchestrator.errors import DockerError, EnvironmentUnusable, RolloutError
from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.descriptors import make_room
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.parked import ParkedSandbox, parked_sandbox
from orchestrator.surroundings import Surroundings
from orchestrator.tools.base import HostTool
from orchestrator.tools.brought import check_names
from orchestrator.types import SandboxSpec

if TYPE_CHECKING:
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import OpenAISettings

log = logging.getLogger(__name__)

T = TypeVar("T")
REPLAY = "replay:"
FALLBACK_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"  # the predecessor's default


async def open_surroundings(
    config: Config, stack: AsyncExitStack, notes: list[str], say: Callable[[str], None] = log.warning
) -> Surroundings:
    """Docker, image, tokenizer, endpoint. Raises EnvironmentUnusable, everything opened so far closed.

    `say` is told when Docker goes away and comes back.
    """
    equipment = await asyncio.to_thread(equip, config.env)
    own_tools = await asyncio.to_thread(brought_host_tools, config.env)
    tools = _web_tools(config, stack)
    check_names(tools, own_tools)
    tools = {**tools, **own_tools}
    check_team(config.env, equipment, tools)
    launcher, channel_directory = await _launcher(config, stack, notes)
    await _check_launcher(launcher, config.sandbox_spec())
    await _remove_leftovers(notes, docker=config.env.launcher == "docker")
    await asyncio.to_thread(_check_tokenizer, config)
    docker = Breaker("Docker", lambda: launcher.ready(config.sandbox_spec()), say)
    # Its first sandboxes are made while the tokenizer loads.
    pool = await stack.enter_async_context(_pool(config, launcher, channel_directory, docker))
    tokenizer = await asyncio.to_thread(find_tokenizer, config)
    completer = await _completer(config, tokenizer, stack, notes)
    sampled = [endpoint(server) for server in config.openai if not server.base_url.startswith(REPLAY)]
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
    """Where all sandboxes of a run come from."""
    env, ramp = config.env, Ramp()

    def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        return parked_sandbox(spec, launcher, channel_directory, ramp)

    async def recovered() -> None:
        await docker.away()
        await docker.passed()

    # A resumed run may have nothing left to do.
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
    """None without a key, and for programs: an agent is not told of tools that cannot work."""
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
    """The one asked for; else the model's own where it loads, else the predecessor's default. Blocks. Raises
    EnvironmentUnusable."""
    name = config.env.tokenizer_name
    if name is not None:
        return None if name.lower() == "none" else load_tokenizer(name)
    return _first_usable(config, load_tokenizer)


def _check_tokenizer(config: Config) -> None:
    """Raises EnvironmentUnusable at once where the name alone, or a look into the folder, tells that nothing can
    be loaded: before sandboxes are made."""
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
            endpoint(server),
            tokenizer,
            server_type=server.server_type,
            tokens=config.env.token_source,
            temperature=config.env.temperature,
            notes=notes,
        )
        stack.push_async_callback(completer.aclose)
        completers.append(
            LimitedCompleter(
                completer,
                training=server.num_max_requests_at_once,
                evaluation=server.num_requests_for_eval,
            )
        )
    if len({completer.takes_ids for completer in completers}) > 1:
        raise EnvironmentUnusable(
            "some of the endpoints give token ids and some do not; "
            "set --env.token_source retokenize or use one kind of server"
        )
    weights = [server.weight for server in config.openai]
    return completers[0] if len(completers) == 1 else RoutedCompleter(completers, weights)


def endpoint(server: OpenAISettings) -> Endpoint:
    """An address alone means OpenAI's usual prefix."""
    base_url = server.base_url.rstrip("/")
    if urlsplit(base_url).path == "":
        base_url += "/v1"
    return Endpoint(base_url, server.model_name, server.key(), server.timeout)


async def _check_launcher(launcher: Launcher, spec: SandboxSpec) -> None:
    """Raises EnvironmentUnusable where no sandbox could be made. An Engine whose storage fails tells all else."""
    await launcher.check(spec)
    try:
        await launcher.ready(spec)
    except RolloutError as error:
        raise EnvironmentUnusable(str(error)) from error


async def _remove_leftovers(notes: list[str], *, docker: bool) -> None:
    """What killed runs left is gone before this one starts; what resists is no reason not to start."""
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
    """(launcher, where sandboxes find their sockets)."""
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
            # A program finds its completions at a port of its own loopback device.
            allow_localhost_tcp=env.allow_localhost_tcp or env.agent_kind == "program",
            advise=notes.append,
        )
    elif env.launcher == "process":
        from orchestrator.launch.process import ProcessLauncher

        launcher = ProcessLauncher(run_id, max_sandboxes=sandboxes)
    else:
        raise EnvironmentUnusable(f"the {env.launcher} launcher is not in this version; use --env.launcher docker")
    stack.push_async_callback(launcher.aclose)
    # Not in a thread: cancelled there, it would be made and nobody's.
    channels = stack.enter_context(Channels(run_id))
    return launcher, channels.directory
