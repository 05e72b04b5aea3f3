"""Opens the endpoints of a run: those that are sampled from, and the judge's. Waits for those still loading."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.agents.call_format import call_format
from orchestrator.completion.base import Completer, CompletionRequest, Endpoint, stop_strings
from orchestrator.completion.chat import ChatCompleter, trial
from orchestrator.completion.connect import connect
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.completion.route import LimitedCompleter, RoutedCompleter
from orchestrator.completion.startup import NO_PATIENCE, Patience, Startup, Wait
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import EnvironmentUnusable, NotServing
from orchestrator.rules.policy import Policy
from orchestrator.rules.waits import first_error
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.sampling import ReasoningSettings, SamplingSettings
from orchestrator.types import AgentSpec, CallFormat, CompletionKind, Sampling

REPLAY = "replay:"


@dataclass(frozen=True, slots=True)
class CompletionNeeds:
    """Which endpoints a run samples from, and what is asked of each."""

    servers: tuple[OpenAISettings, ...]
    sampling: SamplingSettings
    reasoning: ReasoningSettings
    agent: AgentSpec

    def endpoints(self) -> list[Endpoint]:
        """The endpoints to ask over HTTP: recordings are not among them."""
        return [endpoint(self, server) for server in self.servers if not server.base_url.startswith(REPLAY)]


async def open_completer(
    needs: CompletionNeeds,
    tokenizer: HubTokenizer | None,
    stack: AsyncExitStack,
    notes: list[str],
    tell: Callable[[Wait], None],
    policy: Policy,
) -> tuple[Completer, str]:
    """(the completer of all endpoints, why they are asked for text); `stack` closes it. `policy`: what a trainer
    says it serves.

    Endpoints that are still loading are waited for at the same time, and `tell` is told. The first one that cannot
    be used ends the wait for all. Raises EnvironmentUnusable.
    """
    try:
        async with asyncio.TaskGroup() as meanwhile:
            tasks = [
                meanwhile.create_task(_reach(needs, server, tokenizer, stack, tell, policy), name="endpoint")
                for server in needs.servers
            ]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    reached = [task.result() for task in tasks]
    for one in reached:
        notes.extend(note for note in one.notes if note not in notes)
    completers = [one.completer for one in reached]
    if len({completer.takes_ids for completer in completers}) > 1:
        raise EnvironmentUnusable(
            "some of the endpoints give token ids and some do not; "
            "set --env.token_source retokenize or use one kind of server"
        )
    weights = [server.weight for server in needs.servers]
    why = next((one.why_text for one in reached if one.why_text), "")
    return (completers[0] if len(completers) == 1 else RoutedCompleter(completers, weights)), why


@dataclass(frozen=True, slots=True)
class _Reached:
    """An endpoint that serves, or a recording. `why_text`: why it is asked for text; empty: it takes ids."""

    completer: Completer
    why_text: str
    notes: list[str]


async def _reach(
    needs: CompletionNeeds,
    server: OpenAISettings,
    tokenizer: HubTokenizer | None,
    stack: AsyncExitStack,
    tell: Callable[[Wait], None],
    policy: Policy,
) -> _Reached:
    """Raises EnvironmentUnusable."""
    if server.base_url.startswith(REPLAY):
        recorded = Path(server.base_url.removeprefix(REPLAY))
        replayed = await asyncio.to_thread(ReplayCompleter.open, recorded)
        return _Reached(replayed, "" if replayed.takes_ids else "the recorded run had no token ids", [])
    notes: list[str] = []
    patience = Patience(server.startup_timeout, tell)
    completer = await connect_server(needs, server, tokenizer, notes, patience=patience, policy=policy)
    stack.push_async_callback(completer.aclose)
    limited = LimitedCompleter(
        completer, training=server.num_max_requests_at_once, evaluation=server.num_requests_for_eval
    )
    return _Reached(limited, completer.why if isinstance(completer, ChatCompleter) else "", notes)


async def connect_server(
    needs: CompletionNeeds,
    server: OpenAISettings,
    tokenizer: HubTokenizer | None,
    notes: list[str],
    *,
    patience: Patience = NO_PATIENCE,
    policy: Policy | None = None,
) -> Completer:
    """`connect` with what the run asks of this server. Without `patience` it must serve now."""
    settings = needs.sampling
    calls = call_format(settings, needs.agent, tokenizer)
    return await connect(
        endpoint(needs, server),
        tokenizer,
        server_type=server.server_type,
        tokens=settings.token_source,
        temperature=settings.temperature,
        max_token_length=settings.max_token_length,
        calls=calls,
        notes=notes,
        patience=patience,
        policy=policy,
        like=_first_request(needs, calls),
    )


def _first_request(needs: CompletionNeeds, calls: CallFormat | None) -> CompletionRequest:
    """A request with the parameters that the run will send to a chat endpoint. `calls`: as for `connect`."""
    settings, kind = needs.sampling, needs.agent.kind
    sampling = Sampling(settings.temperature, settings.top_p, settings.max_completion_tokens, settings.seed or 0)
    tags = needs.agent.code_tags if kind == "code" else None
    stops = kind == "code" or (kind == "tool_calling" and calls is None)
    stop = stop_strings(CompletionKind.ACTION, tags) if stops else ()
    return trial(sampling, stop=stop, tools=calls is not None or kind == "program")


def endpoint(needs: CompletionNeeds, server: OpenAISettings) -> Endpoint:
    """The endpoint of this server's settings."""
    return Endpoint(
        openai_root(server.base_url),
        server.model_name,
        server.key(),
        server.timeout,
        headers=server.sent_headers(),
        chat_extras=_chat_extras(needs),
        takes_n=not server.n_kwarg_is_ignored,
    )


def _chat_extras(needs: CompletionNeeds) -> dict[str, Any]:
    """Fields the operator's settings add to a chat request.

    Reasoning is asked for as Atropos does, by `reasoning`. Where a service refuses that, as OpenAI, by
    `reasoning_effort` (`parameters`).
    """
    extras: dict[str, Any] = {}
    if needs.sampling.chat_template_kwargs is not None:
        extras["chat_template_kwargs"] = dict(needs.sampling.chat_template_kwargs)
    effort, most = needs.reasoning.reasoning_effort, needs.reasoning.max_reasoning_tokens
    if not needs.reasoning.thinking_mode and effort is None and most is None:
        return extras
    fields = {"effort": effort, "max_tokens": most}
    present = {name: value for name, value in fields.items() if value is not None}
    return {**extras, "reasoning": {"enabled": effort != "none", **present}}


def openai_root(address: str) -> str:
    """The base URL; `/v1` is added to an address without a path. A query stays behind the path."""
    parts = urlsplit(address)
    return parts._replace(path=parts.path.rstrip("/") or "/v1").geturl()


async def judge_serves(judge: ChatCompleter, patience: Patience) -> None:
    """Returns when the judge's endpoint serves. Raises EnvironmentUnusable."""
    startup = Startup(judge.endpoint, patience, "the judge's endpoint", "--env.judge_base_url")
    try:
        await judge.probe(startup, like=trial(Sampling(temperature=0.0, top_p=1.0, max_tokens=1, seed=0)))
    except NotServing:
        raise
    except EnvironmentUnusable as error:
        raise EnvironmentUnusable(f"env.judge_base_url: {error}; the judge's key is JUDGE_API_KEY") from error
    startup.over()
