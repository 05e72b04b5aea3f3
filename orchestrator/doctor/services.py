"""Checks keys, tokenizer, inference endpoints and the web service. No key is in any text."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from orchestrator.completion.endpoints import REPLAY, CompletionNeeds, connect_server, endpoint
from orchestrator.completion.find_tokenizer import find_tokenizer
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.doctor.finding import Finding, fail, ok, warn
from orchestrator.errors import CompletionError, ConfigError, EnvironmentUnusable, NotServing
from orchestrator.rules.redact import Secret
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.tools import ToolSettings
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.tools import open_servers

USAGE_TIMEOUT_S = 15.0


def check_keys(needs: CompletionNeeds) -> Iterator[Finding]:
    """Which endpoints have a key. Nothing is sent, and no key is shown."""
    for server in needs.servers:
        where = _name(server)
        if server.api_key or server.headers:
            yield ok("keys", f"a key for {where}")
        elif server.base_url and not server.base_url.startswith(REPLAY) and endpoint(needs, server).hosted:
            yield fail("keys", f"no key for {where}, which wants one: set OPENAI_API_KEY")
        elif server.base_url:
            yield ok("keys", f"no key for {where}")


async def check_services(needs: CompletionNeeds, tokenizer_digest: str | None = None) -> AsyncIterator[Finding]:
    """Checks the tokenizer, then each endpoint with it."""
    finding, tokenizer = await check_tokenizer(needs, tokenizer_digest)
    yield finding
    for server in needs.servers:
        yield await _endpoint(needs, server, tokenizer, tokenizer_missing=finding.level == "fail")


async def check_tokenizer(
    needs: CompletionNeeds, digest: str | None = None
) -> tuple[Finding, HubTokenizer | None]:
    """(what was found, the tokenizer). `digest`: what that of the run has; None: any will do."""
    if not any(server.base_url for server in needs.servers) and needs.sampling.tokenizer_name is None:
        text = "not checked: set --env.tokenizer_name, or an endpoint and its model's name"
        return warn("tokenizer", text), None
    try:
        tokenizer = await asyncio.to_thread(find_tokenizer, needs.sampling, needs.servers[0].model_name)
    except EnvironmentUnusable as error:
        return fail("tokenizer", str(error)), None
    if tokenizer is None:
        return warn(
            "tokenizer", "env.tokenizer_name is none: groups will have no token ids; fine for `evaluate`"
        ), None
    if digest is not None and await asyncio.to_thread(lambda: tokenizer.digest) != digest:
        return fail("tokenizer", "differs from the run's; put the same files on all nodes"), tokenizer
    return ok("tokenizer", f"{tokenizer.name}, {tokenizer.size} ids, with a chat template"), tokenizer


async def _endpoint(
    needs: CompletionNeeds, server: OpenAISettings, tokenizer: HubTokenizer | None, *, tokenizer_missing: bool
) -> Finding:
    if not server.base_url:
        return warn("endpoint", "no endpoint is set: --openai.base_url URL and --openai.model_name NAME")
    where, notes = _name(server), list[str]()
    try:
        if server.base_url.startswith(REPLAY):
            recorded = Path(server.base_url.removeprefix(REPLAY))
            await asyncio.to_thread(ReplayCompleter.open, recorded)
            return ok("endpoint", f"{where}, which can be replayed")
        if tokenizer_missing:
            needs = replace(needs, sampling=replace(needs.sampling, token_source="auto"))  # noqa: S106 - no password
        completer = await connect_server(needs, server, tokenizer, notes)
    except NotServing as error:  # the doctor's answer is wanted now
        waits = f"; a run waits {server.startup_timeout:g} s for it" if server.startup_timeout else ""
        return fail("endpoint", f"{error}{waits}")
    except (ConfigError, EnvironmentUnusable, CompletionError) as error:
        return fail("endpoint", str(error))
    exact = completer.takes_ids
    await completer.aclose()
    if tokenizer_missing:
        return warn("endpoint", f"{where} answers; without a tokenizer it was not asked for token ids")
    text = "; ".join([f"{where} answers, {'with exact token ids' if exact else 'with text only'}", *notes])
    return ok("endpoint", text) if exact and not notes else warn("endpoint", text)


async def check_web_tools(settings: ToolSettings, key: Secret) -> AsyncIterator[Finding]:
    """Asks Tavily for the key's usage, which costs no credit."""
    if not key:
        yield warn("web tools", "agents get no web tools: set TAVILY_API_KEY for web_search and visit_page")
        return
    from orchestrator.tools.tavily import ServiceFailed, Tavily

    service = Tavily(key, base_url=settings.tavily_base_url, timeout_s=USAGE_TIMEOUT_S, max_calls=1)
    try:
        usage = await service.usage()
    except ServiceFailed as error:
        yield fail("web tools", f"{error}: check TAVILY_API_KEY and --env.tavily_base_url")
    else:
        yield ok("web tools", f"Tavily takes the key; {usage}" if usage else "Tavily takes the key")
    finally:
        await service.aclose()


async def check_mcp_servers(servers: Sequence[McpServer]) -> AsyncIterator[Finding]:
    """Begins each server, and ends it when its tools are known."""
    for server in servers:
        notes: list[str] = []
        try:
            async with AsyncExitStack() as stack:
                tools = await open_servers(
                    [server], (), stack, notes, timeout_s=USAGE_TIMEOUT_S, max_calls=1, fail_rollouts=False
                )
        except (ConfigError, EnvironmentUnusable) as error:
            yield fail("MCP server", str(error))
        else:
            text = "; ".join([f"{server.name} has {', '.join(tools) or 'no tools'}", *notes])
            yield warn("MCP server", text) if notes or not tools else ok("MCP server", text)


def _name(server: OpenAISettings) -> str:
    """The endpoint's address without user, password and query, and its model."""
    return str(server.public()["base_url"] or "the endpoint") + f" ({server.model_name})" * bool(server.base_url)
