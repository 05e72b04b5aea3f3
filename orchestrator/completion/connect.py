"""Finds out with a few small requests how an endpoint can be sampled from, and connects.

1. The model list: whether a server answers and takes the key, and what kind of server it is.
2. One token through that server's id-in dialect: whether ids and log-probs really come back and both
   sides have the same tokenizer.
3. vLLM, llama.cpp: a text through the server's own tokenizer. Without ids: one token of chat.

Hosted services are asked for the model list only. After failures that is how it is seen whether an endpoint still
answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from orchestrator.completion.atropos_generate import AtroposDialect
from orchestrator.completion.base import PROBE_HEADER, Completer, CompletionRequest, Endpoint, Refusal, ids_of
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.http import HttpClient, Unreadable
from orchestrator.completion.ids import Dialect, IdCompleter, WrongTokenizer
from orchestrator.completion.llamacpp import LlamaCppCompleter, LlamaCppDialect
from orchestrator.completion.retry import Retryable
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.vllm import VllmDialect
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.types import Message, Sampling

log = logging.getLogger(__name__)

TokenPolicy = Literal["auto", "exact", "retokenize"]
ServerType = Literal["auto", "openai", "vllm", "sglang", "llamacpp", "atropos", "trl"]
PROBE_TIMEOUT_S = 60.0
LIST_TIMEOUT_S = 10.0
_KNOWN = frozenset(("vllm", "sglang", "llamacpp"))  # the `owned_by` in model lists of servers that take ids
_TEXT = "I add 12 and 30, größer als 7:\n<code>\nfor i in range(3):\n    print(12 + 30)\n</code>"


async def connect(
    endpoint: Endpoint,
    tokenizer: HubTokenizer | None,
    *,
    server_type: ServerType = "auto",
    tokens: TokenPolicy = "auto",
    temperature: float = 1.0,
    notes: list[str] | None = None,
) -> Completer:
    """A completer, tried unless the service is hosted. Raises EnvironmentUnusable, which says what to do."""
    notes = notes if notes is not None else []
    client = HttpClient(endpoint)
    try:
        owner = await _owner(client)
        dialect = _dialect(owner, server_type)
        if endpoint.hosted or tokens == "retokenize" or tokenizer is None or dialect is None:
            why = "it is asked for text" if tokens == "retokenize" else _why_no_ids(endpoint, tokenizer)
        else:
            try:
                exact = await _ids(dialect, client, tokenizer, temperature, notes)
                _demand_no_asked_reasoning(endpoint, "it takes token ids")
                return exact
            except WrongTokenizer as error:
                raise EnvironmentUnusable(
                    f"the tokenizer is not the endpoint's: {error}; set --env.tokenizer_name to the model's own"
                ) from error
            except AuthenticationError as error:
                raise EnvironmentUnusable(str(error)) from error
            except Refusal as error:
                if owner not in _KNOWN:
                    why = f"as {dialect.name} it answered: {error}"
                else:
                    # It takes ids, but not ours: going on with text would hide the reason.
                    raise EnvironmentUnusable(
                        f"the endpoint refuses our token ids ({error}); set --env.tokenizer_name to the model's "
                        "own tokenizer, or --env.token_source retokenize to do without its ids"
                    ) from error
            except (CompletionError, ContextLengthError) as error:
                why = f"as {dialect.name} it answered: {error}"
        if tokens == "exact":
            raise EnvironmentUnusable(
                f"the endpoint {endpoint.shown} gives no exact token ids ({why}); "
                "use vLLM, SGLang or llama.cpp, or set --env.token_source retokenize"
            )
        if owner in _KNOWN:
            _demand_no_asked_reasoning(endpoint, f"{owner} does not know it")
        notes.append(f"tokens are made from text: {why}")
        completer = ChatCompleter(client)
        if not endpoint.hosted:
            await completer.probe(requests=1 if dialect is not None and tokenizer is not None else 2)
    except BaseException:
        await client.aclose()
        raise
    return completer


async def _owner(client: HttpClient) -> str | None:
    """The server's `owned_by` in its model list: `vllm`, `sglang`, `llamacpp` …; empty: none; None: no list."""
    url = client.endpoint.shown
    try:
        answer = await client.get("/v1/models", timeout_s=LIST_TIMEOUT_S, headers=PROBE_HEADER)
    except AuthenticationError as error:
        raise EnvironmentUnusable(str(error)) from error
    except (Refusal, ContextLengthError, Unreadable):
        return None
    except CompletionError as error:
        if isinstance(error, Retryable) and error.status is not None:
            return None  # a server answers; the next request shows more
        raise EnvironmentUnusable(
            f"no answer from the endpoint {url}: {error}; start it or set --openai.base_url"
        ) from error
    try:
        return str(answer["data"][0].get("owned_by", ""))
    except (KeyError, TypeError, IndexError, AttributeError):
        return ""


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
    if server_type in ("openai", "trl"):
        return None
    if server_type == "atropos" or (server_type == "vllm" and owner is None):
        return AtroposDialect()
    if server_type == "sglang" or owner == "sglang":
        return SglangDialect()
    if server_type == "llamacpp" or owner == "llamacpp":
        return LlamaCppDialect()
    # An unknown server with a model list may be vLLM behind a gateway: one sampled token shows it.
    return VllmDialect() if owner is not None else AtroposDialect()


async def _ids(
    dialect: Dialect, client: HttpClient, tokenizer: HubTokenizer, temperature: float, notes: list[str]
) -> IdCompleter:
    """An exact completer, probed. Raises what `IdCompleter.probe` raises, and EnvironmentUnusable."""
    if unknown := tokenizer.unknown_template_kwargs:
        raise EnvironmentUnusable(
            f"env.chat_template_kwargs: the chat template of {tokenizer.name} does not know {', '.join(unknown)}"
        )
    kind = LlamaCppCompleter if isinstance(dialect, LlamaCppDialect) else IdCompleter
    completer = kind(dialect, client, tokenizer)
    text = tokenizer.render((Message("user", "1+1="),), generation_prompt=True)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1, seed=1)
    request = CompletionRequest((), ids_of(tokenizer.encode(text)), (), sampling, "probe", "probe", 0, 0)
    try:
        await completer.probe(request, PROBE_TIMEOUT_S)
    except (Refusal, Retryable) as error:
        # Old servers answer 400 with the parameter's name, or a bare 500.
        seed_unknown = "sampling_seed" in str(error) or (isinstance(error, Retryable) and error.status == 500)
        if not isinstance(dialect, SglangDialect) or not seed_unknown:
            raise
        completer = IdCompleter(SglangDialect(seeded=False), client, tokenizer)
        await completer.probe(request, PROBE_TIMEOUT_S)
        notes.append("this SGLang knows no sampling_seed: rollouts are not repeatable by seed")
    if isinstance(dialect, VllmDialect | LlamaCppDialect):
        await _compare_tokenizers(dialect, client, tokenizer)
    if isinstance(dialect, SglangDialect) and temperature != 1.0:
        notes.append(
            "SGLang's log-probs are of the distribution at the sampling temperature "
            "unless it was started with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    return completer


def _demand_no_asked_reasoning(endpoint: Endpoint, why: str) -> None:
    """Raises EnvironmentUnusable where a hosted service's parameter asks for reasoning: it would be ignored."""
    if endpoint.chat_extras.keys() & {"reasoning", "reasoning_effort"}:
        raise EnvironmentUnusable(
            f"the endpoint {endpoint.shown} cannot be asked for reasoning ({why}): instead of env.thinking_mode, "
            "env.reasoning_effort and env.max_reasoning_tokens tell the chat template, with something like "
            """--env.chat_template_kwargs '{"enable_thinking": true}'"""
        )


async def _compare_tokenizers(dialect: Dialect, client: HttpClient, tokenizer: HubTokenizer) -> None:
    """Raises WrongTokenizer where the server's tokenizer gives other ids. No `/tokenize`: it is not checked."""
    # In the chat template, so that the special tokens' ids are compared too.
    text = tokenizer.render((Message("user", _TEXT),), generation_prompt=True)
    body = (
        {"content": text, "add_special": False, "parse_special": True}
        if isinstance(dialect, LlamaCppDialect)
        else {"model": client.endpoint.model, "prompt": text, "add_special_tokens": False}
    )
    try:
        answer = await client.post("/tokenize", body, timeout_s=LIST_TIMEOUT_S, headers=PROBE_HEADER)
        theirs = answer["tokens"]
    except AuthenticationError:
        raise
    except (CompletionError, ContextLengthError, KeyError, TypeError) as error:
        log.debug("no /tokenize at %s: %s", client.endpoint.shown, error)
        return
    if isinstance(theirs, list) and theirs != tokenizer.encode(text):
        raise WrongTokenizer(f"it makes {len(theirs)} other ids of a text of ours")


def _why_no_ids(endpoint: Endpoint, tokenizer: HubTokenizer | None) -> str:
    if endpoint.hosted:
        return "a hosted service gives no ids"
    return "there is no tokenizer" if tokenizer is None else "its server type gives no ids"
