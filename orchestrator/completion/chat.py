"""Any OpenAI-compatible chat endpoint, through the `openai` client.

Text in, text out. Ids and log-probs are recorded where the endpoint gives them (vLLM's
`return_token_ids`, llama.cpp's `id` in log-prob entries), but a chat prompt is rendered anew by the
server each turn, so the data made from it are `retokenized`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import replace
from typing import Any

import openai

from orchestrator.completion.base import PROBE_HEADER, CompletionRequest, Endpoint, Refusal, UnusableSample
from orchestrator.completion.bounded import IDENTITY, AnswerTooLarge, bound
from orchestrator.completion.ids import CONNECT_TIMEOUT_S, finished_by, version_text
from orchestrator.completion.line import cut_at_stop
from orchestrator.completion.retry import (
    NONSENSE,
    Limiter,
    Retryable,
    RetryPolicy,
    is_context_length,
    retry_after_s,
    with_retries,
)
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    ContextLengthError,
    EnvironmentUnusable,
)
from orchestrator.run.line import MOST
from orchestrator.text import valid
from orchestrator.types import Completion, Message, Sampling

log = logging.getLogger(__name__)

# Parameters that servers beyond OpenAI's know; sent so that none of their defaults applies.
_EXTRAS = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "return_token_ids": True,
}
# What may be left out when an endpoint refuses it by name. Temperature is not among them.
_OPTIONAL = (*_EXTRAS, "seed", "logprobs", "presence_penalty", "frequency_penalty", "n")
PROBES = 2
PROBE_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 32 << 20
MAX_TOKEN_CHARS = 1024  # the longest tokens there are hold spaces, 128 and more of them
MAX_TEMPLATE_TOKENS = 100_000  # what a server puts around a conversation: a system prompt of its own, tools


class OpenAICompleter:
    """Chat completions of one endpoint."""

    takes_ids = False

    def __init__(self, endpoint: Endpoint, retry: RetryPolicy | None = None) -> None:
        self.endpoint = endpoint
        self._retry = retry or RetryPolicy()
        self._limiter = Limiter()
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key or "none",  # the client insists; local servers ignore it
            timeout=openai.Timeout(endpoint.timeout_s, connect=min(CONNECT_TIMEOUT_S, endpoint.timeout_s)),
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(
                headers=IDENTITY, event_hooks={"response": [bound(MAX_BODY_BYTES)]}
            ),
        )
        self._left_out: set[str] = set(_EXTRAS) if endpoint.hosted else set()
        self._max_tokens_name = "max_tokens"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sampling parameters this endpoint does not know and is not sent."""
        return tuple(sorted(self._left_out))

    async def aclose(self) -> None:
        await self._client.close()

    async def probe(self, requests: int = PROBES) -> None:
        """Whether the endpoint takes the key, knows the model and serves. Raises EnvironmentUnusable.

        At most `requests` completions of one token each; parameters it refuses are left out from then on.
        """
        url = self.endpoint.shown
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1, seed=1)
        request = CompletionRequest((Message("user", "1+1="),), None, (), sampling, "probe", "probe", 0, 0)
        for left in reversed(range(requests)):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._call(
                        request, headers=PROBE_HEADER, timeout_s=PROBE_TIMEOUT_S, refuse_all_extras=True
                    )
            except AuthenticationError as error:
                raise EnvironmentUnusable(str(error)) from error
            except _ParameterRefused:
                continue
            except UnusableSample as error:  # one token of a model that thinks first is no text
                log.debug("the probe of %s: %s", url, error)
                return
            except Retryable as error:
                if left == 0:
                    raise EnvironmentUnusable(f"the endpoint {url} does not serve: {error}") from error
            except (CompletionError, ContextLengthError) as error:
                raise EnvironmentUnusable(f"the endpoint {url} refuses completions: {error}") from error
            except TimeoutError as error:
                text = f"the endpoint {url} does not serve: no completion within {PROBE_TIMEOUT_S:g} s"
                raise EnvironmentUnusable(text) from error
            else:
                return

    async def sample(self, request: CompletionRequest) -> Completion:
        async def call() -> Completion:
            while True:
                try:
                    return await self._call(request)
                except _ParameterRefused as refused:  # each refusal shortens the list: this ends
                    log.warning("%s does not know %s: left out", self.endpoint.shown, refused.names)

        completion, retries = await with_retries(call, self._retry, self.endpoint.timeout_s, self._limiter)
        return replace(completion, retries=retries) if retries else completion

    async def _call(
        self,
        request: CompletionRequest,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        refuse_all_extras: bool = False,
    ) -> Completion:
        try:
            response = await self._client.chat.completions.create(
                **self._body(request), extra_headers=headers, timeout=timeout_s or openai.NOT_GIVEN
            )
        except openai.APIStatusError as error:
            raise self._refusal(error, request, refuse_all_extras) from error
        except openai.APITimeoutError as error:
            # By name: the client may have been built on httpx or on a fork of it. Nothing was asked yet.
            if type(error.__cause__).__name__ in ("ConnectTimeout", "PoolTimeout"):
                raise Retryable(f"connection failed: none within {CONNECT_TIMEOUT_S:g} s") from error
            raise CompletionTimeout(f"no completion within {self.endpoint.timeout_s:g} s") from error
        except AnswerTooLarge as error:
            raise CompletionError(str(error)) from error
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, AnswerTooLarge):
                raise CompletionError(str(error.__cause__)) from error
            raise Retryable(f"connection failed: {self._cause(error)}") from error
        except (openai.OpenAIError, *NONSENSE) as error:
            raise Retryable(f"unreadable answer: {self._text(error)}") from error
        try:
            return self._completion(response, request)
        except NONSENSE as error:
            raise Retryable(f"an answer that is no chat completion: {type(error).__name__}") from error

    def _body(self, request: CompletionRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            self._max_tokens_name: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1,
            "seed": sampling.seed,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": True,
            "stop": list(request.stop) or None,
        }
        body = {k: v for k, v in body.items() if k not in self._left_out and v is not None}
        extras = {k: v for k, v in _EXTRAS.items() if k not in self._left_out}
        # What is in `extra_body` the client does not walk through, a tenth of a millisecond for each message.
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        return {**body, "messages": (), "extra_body": {**extras, "messages": messages}}

    def _refusal(
        self, error: openai.APIStatusError, request: CompletionRequest, refuse_all_extras: bool
    ) -> Exception:
        status, text = error.status_code, self._text(error)
        if status in (401, 403):
            return AuthenticationError(self._key_refused(status, text))
        if is_context_length(status, text):
            return ContextLengthError(text)
        if status in (408, 409, 429) or status >= 500:
            after_s = retry_after_s(error.response.headers.get("retry-after"))
            return Retryable(f"HTTP {status}: {text}", after_s, status)
        if status in (400, 422):

            def names(name: str) -> bool:
                """Not where a conversation may be quoted: that is for the model and its sandbox to write."""
                word = re.compile(rf"\b{name}\b")
                return bool(word.search(text)) and not any(word.search(m.content) for m in request.messages)

            if names("max_completion_tokens") and self._max_tokens_name == "max_tokens":
                self._max_tokens_name = "max_completion_tokens"
                return _ParameterRefused(("max_tokens",))
            named = {name for name in _OPTIONAL if names(name) and name not in self._left_out}
            if not named and refuse_all_extras:
                named = set(_EXTRAS) - self._left_out
            if named:
                self._left_out |= named
                return _ParameterRefused(tuple(sorted(named)))
        return Refusal(f"HTTP {status}: {text}")

    def _completion(self, response: Any, request: CompletionRequest) -> Completion:
        """The answer as a value. Everything in it is the endpoint's word: checked here."""
        choices = getattr(response, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise Retryable("an answer without choices")
        choice = choices[0]
        if choice.message is None:
            raise Retryable("an answer without a message")
        said = getattr(choice.message, "content", None)
        if not isinstance(said, str | None):
            raise Retryable("an answer whose text is none")
        text = valid(said or "")  # a server may cut a character in two
        reason = getattr(choice, "finish_reason", None)
        finish_reason = finished_by(reason)
        tokens, logprobs = _ids_and_logprobs(choice)
        usage = getattr(response, "usage", None)
        most, asked = request.sampling.max_tokens, sum(len(m.content) for m in request.messages)
        if len(text) > most * MAX_TOKEN_CHARS:
            raise Retryable(f"{len(text)} characters where {most} tokens were asked for")
        # Budgets are made of these numbers: one beyond what can be is no reason to end a rollout.
        sampled = min(most, _count(usage, "completion_tokens") or len(tokens or logprobs or ()) or int(text != ""))
        prompt = _count(usage, "prompt_tokens")
        completion = Completion(
            text=text,
            visible=cut_at_stop(text, request.stop),
            finish_reason=finish_reason,
            tokens_T=tokens,
            logprobs_T=logprobs,
            prompt_tokens=prompt if prompt <= 4 * asked + MAX_TEMPLATE_TOKENS else 0,
            completion_tokens=max(1, sampled),
            policy_version=_policy_version(response),
        )
        # No retry: an endpoint need not know seeds, and then the next sample would be another one.
        if finish_reason == "content_filter":
            raise UnusableSample(f"a sample that ended by {str(reason)[:40]!r}", completion)
        if said is None or not sampled:
            raise UnusableSample("a sample without text", completion)
        return completion

    def _key_refused(self, status: int, text: str) -> str:
        what = "the key" if self.endpoint.api_key else "a request without a key"
        return (
            f"the endpoint {self.endpoint.shown} refuses {what} (HTTP {status}: {text}); "
            "set --openai.api_key or OPENAI_API_KEY"
        )

    def _text(self, error: Exception) -> str:
        return self.endpoint.redact(getattr(error, "message", None) or str(error) or type(error).__name__)

    def _cause(self, error: Exception) -> str:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return self.endpoint.redact(str(cause) or type(cause).__name__)


class _ParameterRefused(Exception):
    """The endpoint does not know these parameters; they are left out from now on."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(", ".join(names))
        self.names = ", ".join(names)


def _ids_and_logprobs(choice: Any) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """(ids, log-probs) where the endpoint gives whole lists of them. Raises Retryable on nonsense."""
    entries = getattr(getattr(choice, "logprobs", None), "content", None)
    ids: Any = getattr(choice, "token_ids", None)
    logprobs: tuple[float, ...] | None = None
    if isinstance(entries, list) and entries:
        values = [getattr(entry, "logprob", None) for entry in entries]
        if not all(isinstance(v, int | float) and math.isfinite(v) and v <= 1e-6 for v in values):
            raise Retryable("an answer with a log-prob that is none")
        logprobs = tuple(min(0.0, float(v)) for v in values if v is not None)
        if ids is None:
            ids = [getattr(entry, "id", None) for entry in entries]
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids) or not ids:
        return None, logprobs
    if logprobs is not None and len(logprobs) != len(ids):
        raise Retryable(f"an answer with {len(ids)} ids and {len(logprobs)} log-probs")
    return tuple(ids), logprobs


def _count(usage: Any, name: str) -> int:
    value = getattr(usage, name, None)
    return value if type(value) is int and 0 < value <= MOST else 0  # no record can be read back with more


def _policy_version(response: Any) -> str | None:
    value = getattr(response, "weight_version", None) or getattr(response, "policy_version", None)
    return version_text(value)
