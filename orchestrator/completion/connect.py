"""Finds out with a few small requests how an endpoint can be sampled from, and connects.

1. The model list: whether a server answers and takes the key, what kind of server it is, and how many tokens of
   prompt and completion together it holds.
2. One token through that server's id-in dialect: whether ids and log-probs really come back and both
   sides have the same tokenizer.
3. vLLM, llama.cpp: a text through the server's own tokenizer. Without ids: one token of chat.

Hosted services are asked for the model list only. A probe that finds the endpoint still loading is sent again
(`startup`).

After failures the model list is how it is seen whether an endpoint still answers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.completion.base import PROBE_HEADER, Completer, CompletionRequest, Endpoint, Refusal
from orchestrator.completion.chat import ChatCompleter, trial
from orchestrator.completion.http import HttpClient, Unreadable
from orchestrator.completion.ids import Dialect, IdCompleter
from orchestrator.completion.llamacpp import LlamaCppDialect
from orchestrator.completion.probe_ids import IdProbe
from orchestrator.completion.retry import NONSENSE, Retryable
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.startup import NO_PATIENCE, Patience, Startup
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.versions import Attribution
from orchestrator.completion.vllm import AtroposDialect, VllmDialect
from orchestrator.errors import CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.rules.policy import Policy
from orchestrator.types import CallFormat, Sampling, ServerType

log = logging.getLogger(__name__)

TokenPolicy = Literal["auto", "exact", "retokenize"]
LIST_TIMEOUT_S = 10.0
_KNOWN = frozenset(("vllm", "sglang", "llamacpp"))  # the `owned_by` in model lists of servers that take ids


async def connect(
    endpoint: Endpoint,
    tokenizer: HubTokenizer | None,
    *,
    server_type: ServerType = "auto",
    tokens: TokenPolicy = "auto",
    temperature: float = 1.0,
    max_token_length: int | None = None,
    calls: CallFormat | None = None,
    notes: list[str] | None = None,
    patience: Patience = NO_PATIENCE,
    policy: Policy | None = None,
    like: CompletionRequest | None = None,
) -> Completer:
    """A completer, tried unless the service is hosted. `calls`: how the run's agents call the tools that they
    bring; None: they bring none. `policy`: what a trainer says it serves. `like`: what the run will send to a chat
    endpoint.

    Raises EnvironmentUnusable, which says what to do; it is NotServing for an endpoint that is away or loading
    when the patience ends.
    """
    notes, policy = notes if notes is not None else [], policy or Policy()
    like = like or trial(
        Sampling(temperature=temperature, top_p=1.0, max_tokens=1, seed=1), tools=calls is not None
    )
    client, startup = HttpClient(endpoint), Startup(endpoint, patience)
    try:
        card = await _card(client, startup)
        owner = card.owner
        if card.context_length is not None and card.context_length < (max_token_length or 0):
            notes.append(
                f"{endpoint.shown} holds {card.context_length} tokens, fewer than env.max_token_length "
                f"({max_token_length}): rollouts that are longer end as context_length"
            )
        dialect = _dialect(owner, server_type)
        if endpoint.hosted or tokens == "retokenize" or tokenizer is None or dialect is None:
            why = "it was asked for" if tokens == "retokenize" else _why_no_ids(endpoint, tokenizer)
        else:
            probe = IdProbe(dialect, client, tokenizer, startup, owner in _KNOWN, temperature, notes, policy)
            result = await probe.ids_or_why_not()
            if isinstance(result, IdCompleter):
                # llama.cpp tells a completion that fills its context as it tells one whose beginning it dropped.
                spare = int(isinstance(dialect, LlamaCppDialect))
                result.context_length = card.context_length and card.context_length - spare
                _demand_no_asked_reasoning(endpoint, "it takes token ids")
                startup.over()
                return result
            why = result
        if tokens == "exact":
            raise EnvironmentUnusable(
                f"the endpoint {endpoint.shown} gives no exact token ids ({why}); "
                "use vLLM, SGLang or llama.cpp, or set --env.token_source retokenize"
            )
        if owner in _KNOWN:
            _demand_no_asked_reasoning(endpoint, f"{owner} does not know it")
        notes.append(f"{'no token ids' if tokenizer is None else 'tokens are made from text'}: {why}")
        completer = ChatCompleter(client, attribution=Attribution(policy), why=why)
        completer.context_length = card.context_length
        if not endpoint.hosted:
            one = dialect is not None and tokenizer is not None and not like.wishes.tools
            await completer.probe(
                startup, requests=1 if one else 2, like=like, needs_tools=calls is not None, notes=notes
            )
        startup.over()
    except BaseException:
        await client.aclose()
        raise
    return completer


@dataclass(frozen=True, slots=True)
class _Card:
    """What the model list says. `owner`: its `owned_by`, as `vllm`, `sglang`, `llamacpp`; empty: none; None: there
    is no list. `context_length`: tokens of prompt and completion together; None: it does not say."""

    owner: str | None = None
    context_length: int | None = None


async def _card(client: HttpClient, startup: Startup) -> _Card:
    try:
        answer = await startup.answered(
            lambda: client.get("/v1/models", timeout_s=LIST_TIMEOUT_S, headers=PROBE_HEADER)
        )
    except (Refusal, ContextLengthError, Unreadable):
        return _Card()
    except CompletionError as error:
        raise EnvironmentUnusable(
            f"no answer from the endpoint {client.endpoint.shown}: {error}; start it or set --openai.base_url"
        ) from error
    try:
        cards = {str(one.get("id")): one for one in answer["data"]}
        first = answer["data"][0]
        owner = str(first.get("owned_by", ""))
        own = cards.get(client.endpoint.model, first if owner in _KNOWN else {})
        base = cards.get(str(own.get("parent")), {})  # of an adapter, which has no length of its own
        # By vLLM and SGLang; by llama.cpp.
        length = own.get("max_model_len") or base.get("max_model_len") or (own.get("meta") or {}).get("n_ctx")
        return _Card(owner, length if type(length) is int and length > 0 else None)
    except NONSENSE:
        return _Card("")


async def one_answers(endpoints: Sequence[Endpoint]) -> None:
    """Returns when one of them answers a request for its models. Otherwise raises the last one's CompletionError,
    which may be an AuthenticationError."""
    for number, endpoint in enumerate(endpoints, 1):
        try:
            await _answers(endpoint)
        except CompletionError:
            if number == len(endpoints):
                raise
        else:
            return


async def _answers(endpoint: Endpoint) -> None:
    client = HttpClient(endpoint)
    try:
        await client.get("/v1/models", timeout_s=LIST_TIMEOUT_S, headers=PROBE_HEADER)
    except (Refusal, Unreadable, ContextLengthError):
        pass  # no list, but a server that says so
    except Retryable as error:
        if error.status is None or error.status >= 500:
            raise
    finally:
        await client.aclose()


def _dialect(owner: str | None, server_type: ServerType) -> Dialect | None:
    """The id-in dialect to try; None: text only."""
    if server_type == "openai" or (server_type == "trl" and owner != "vllm"):
        return None  # TRL starts vLLM's own server; the one that it had before gives no model list
    if server_type == "atropos" or (server_type == "vllm" and owner is None):
        return AtroposDialect()
    if server_type == "sglang" or owner == "sglang":
        return SglangDialect()
    if server_type == "llamacpp" or owner == "llamacpp":
        return LlamaCppDialect()
    # An unknown server with a model list may be vLLM behind a gateway: one sampled token shows it.
    return VllmDialect() if owner is not None else AtroposDialect()


def _demand_no_asked_reasoning(endpoint: Endpoint, why: str) -> None:
    """Raises EnvironmentUnusable where a hosted service's parameter asks for reasoning: it would be ignored."""
    if "reasoning" in endpoint.chat_extras:
        raise EnvironmentUnusable(
            f"the endpoint {endpoint.shown} cannot be asked for reasoning ({why}): instead of env.thinking_mode, "
            "env.reasoning_effort and env.max_reasoning_tokens tell the chat template, with something like "
            """--env.chat_template_kwargs '{"enable_thinking": true}'"""
        )


def _why_no_ids(endpoint: Endpoint, tokenizer: HubTokenizer | None) -> str:
    if endpoint.hosted:
        return "a hosted service gives no ids"
    return "env.tokenizer_name is none" if tokenizer is None else "its server type gives no ids"
