"""What the id-in dialects share: retries, and the checks on every answer.

A dialect says how a request looks and how an answer is read; this module sends the request and refuses
answers that do not hold one log-prob per sampled id. Sampled text is decoded from the ids here, never taken
from the server: the token that completes a stop string may hold more text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from orchestrator.completion.base import PROBE_HEADER, CompletionRequest, UnusableSample, answer_bytes, ids_of
from orchestrator.completion.http import MAX_BODY_BYTES, HttpClient
from orchestrator.completion.line import visible_text
from orchestrator.completion.reasoning import LONGEST_TAG, opened_by
from orchestrator.completion.retry import (
    BROKEN_OFF,
    NONSENSE,
    Limiter,
    Retryable,
    RetryPolicy,
    SpoiltSample,
    with_retries,
)
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import CompletionError
from orchestrator.types import Completion

# No sampler but temperature and top_p, by the names vLLM, SGLang and Atropos share; every id and its own text.
UNFILTERED: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": False,
}
UNTOLD = -1  # the prompt's length, where the server does not tell it
ROUNDING = 1e-6  # a log-prob above zero by less than this is a rounding error


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer as a dialect read it, before it is checked.

    `prompt_ids`: the prompt as the server says it got it. `text`: the ids as the server decodes them, compared
    by the probe to see whether both sides have the same tokenizer. `sampled_tokens`: how many ids the server
    says it sampled.
    """

    ids: list[Any]
    logprobs: list[Any]
    finish_reason: str
    prompt_tokens: int
    prompt_ids: list[Any] | None = None
    policy_version: str | None = None
    text: str | None = None
    sampled_tokens: int | None = None


class Dialect(Protocol):
    """One server's way of taking ids and giving ids."""

    name: str
    path: str
    streams: bool

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        """The JSON to post. Every sampling parameter is in it."""

    def read(self, answer: Any) -> Sampled:
        """Ids and log-probs of an answer (of the list of events where it streams).

        Raises KeyError, TypeError, IndexError, ValueError for an answer of another shape.
        """


class WrongTokenizer(CompletionError):
    """The endpoint's model has another tokenizer than ours."""


class IdCompleter:
    """Completions of one endpoint that takes ids, in one dialect."""

    takes_ids = True

    def __init__(
        self, dialect: Dialect, client: HttpClient, tokenizer: HubTokenizer, retry: RetryPolicy | None = None
    ) -> None:
        self.dialect = dialect
        self.endpoint = client.endpoint
        self._client = client
        self._tokenizer = tokenizer
        self._retry = retry or RetryPolicy()
        self._limiter = Limiter()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def sample(self, request: CompletionRequest) -> Completion:
        completion, retries = await with_retries(
            lambda: self.call(request), self._retry, self.endpoint.timeout_s, self._limiter
        )
        return replace(completion, retries=retries) if retries else completion

    async def call(self, request: CompletionRequest) -> Completion:
        """One request without retries. Raises Retryable, CompletionError, ContextLengthError."""
        return (await self._answer(request, self.endpoint.timeout_s, None))[1]

    async def probe(self, request: CompletionRequest, timeout_s: float) -> None:
        """One request before the first task. Raises WrongTokenizer and what `call` raises."""
        sampled, completion = await self._answer(request, timeout_s, PROBE_HEADER)
        ids = completion.tokens_T or ()
        if not isinstance(sampled.text, str) or self._tokenizer.is_end(ids[-1]):
            return
        ours, theirs = completion.text.strip(), sampled.text.strip()
        if ours != theirs and "\ufffd" not in ours + theirs:
            raise WrongTokenizer(
                f"the endpoint decodes id {ids[0]} to {theirs[:40]!r}, the tokenizer to {ours[:40]!r}"
            )

    async def _answer(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> tuple[Sampled, Completion]:
        """(the answer as it came, the checked completion). Raises Retryable for an answer of another shape."""
        try:
            sampled = await self._sampled(request, timeout_s, headers)
            return sampled, self._checked(sampled, request)
        except NONSENSE as error:
            raise Retryable(f"an answer that is none of {self.dialect.name}: {type(error).__name__}") from error

    async def _sampled(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> Sampled:
        return self.dialect.read(await self._sent(request, timeout_s, headers))

    async def _sent(self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None) -> Any:
        """The answer as it came."""
        send = self._client.stream if self.dialect.streams else self._client.post
        body = self.dialect.body(request, self.endpoint.model)
        if not self.endpoint.takes_n:
            body.pop("n", None)
        max_bytes = min(MAX_BODY_BYTES, answer_bytes(request))
        return await send(self.dialect.path, body, timeout_s=timeout_s, headers=headers, max_bytes=max_bytes)

    def _checked(self, sampled: Sampled, request: CompletionRequest) -> Completion:
        prompt = request.prompt_ids or ids_of()
        ids = tuple(sampled.ids)
        # Whole lists are checked at a time: one by one, the checks were a fifth of a completion's cost here.
        if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
            raise Retryable("an id that is none")
        if sampled.sampled_tokens not in (None, len(ids)):
            raise Retryable(f"{_number(sampled.sampled_tokens)} ids were sampled, {len(ids)} came")
        if len(sampled.logprobs) != len(ids):
            raise Retryable(f"{len(ids)} ids but {len(sampled.logprobs)} log-probs")
        if not set(map(type, sampled.logprobs)) <= {int, float} or not all(map(math.isfinite, sampled.logprobs)):
            raise Retryable("a log-prob that is no number")
        if (highest := max(sampled.logprobs, default=0.0)) > ROUNDING:
            raise Retryable(f"a log-prob above zero ({highest})")
        logprobs = tuple(map(float, sampled.logprobs))
        if highest > 0.0:
            logprobs = tuple(min(0.0, value) for value in logprobs)
        if len(ids) > request.sampling.max_tokens:
            raise Retryable(f"{len(ids)} ids where {request.sampling.max_tokens} were asked for")
        if sampled.prompt_ids is not None and sampled.prompt_ids != prompt.tolist():
            raise Retryable("the server sampled from another prompt than it was given")
        if sampled.prompt_tokens not in (len(prompt), UNTOLD):
            seen = _number(sampled.prompt_tokens)
            raise Retryable(f"the server saw {seen} prompt ids, it was given {len(prompt)}")
        finish_reason = finished_by(sampled.finish_reason)
        known = self._known(ids)
        opened = opened_by(self._tokenizer.decode(prompt[-LONGEST_TAG:].tolist()))
        text, visible, reasoning_chars = visible_text(self._tokenizer, ids[:known], request.stop, opened)
        completion = Completion(
            text=text,
            visible=visible,
            finish_reason=finish_reason,
            tokens_T=ids[:known],
            logprobs_T=logprobs[:known],
            prompt_tokens=len(prompt),
            completion_tokens=max(1, len(ids)),
            policy_version=sampled.policy_version,
            reasoning_chars=reasoning_chars,
        )
        if known < len(ids):
            raise SpoiltSample(f"an id outside the tokenizer's {self._tokenizer.size}", completion)
        if not ids:
            raise SpoiltSample("an empty answer", completion)
        if finish_reason == "content_filter":
            raise UnusableSample(f"a sample that ended by {sampled.finish_reason[:40]!r}", completion)
        return completion

    def _known(self, ids: tuple[int, ...]) -> int:
        """How many ids come before the first one that the tokenizer does not have. A model may have more rows than
        its tokenizer has ids, and sample such a row: it has no text, and servers refuse it in a prompt."""
        if max(ids, default=0) < self._tokenizer.size:
            return len(ids)
        return next(place for place, token in enumerate(ids) if token >= self._tokenizer.size)


def finished_by(reason: object) -> Literal["stop", "length", "content_filter"]:
    """Why a sample ended. Raises Retryable where the server gives no reason, or broke the sample off itself."""
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    if not isinstance(reason, str) or reason.lower() in BROKEN_OFF:
        raise Retryable(f"an answer that ended by {str(reason)[:40]!r}")
    return "content_filter"


def version_text(value: Any) -> str | None:
    """A policy version as the server tells it, cut to 200 characters. Raises TypeError unless text or a number."""
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError("a policy version that is none")
    return None if value is None else str(value)[:200]


def _number(value: int | None) -> int:
    """The value, for an error message. Raises TypeError where it is no number."""
    if not isinstance(value, int):
        raise TypeError("a number that is none")
    return value
