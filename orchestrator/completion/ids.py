"""What the id-in dialects share: HTTP through aiohttp, retries, and the checks on every answer.

A dialect says how a request looks and how an answer is read; this module sends it, classifies
errors and refuses answers that do not hold one log-prob per sampled id. Sampled text is decoded
from the ids here, never taken from the server: what completes a stop string may carry more text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from orchestrator.completion.base import (
    PROBE_HEADER,
    CompletionRequest,
    Endpoint,
    Refusal,
    UnusableSample,
    answer_bytes,
    ids_of,
)
from orchestrator.completion.line import visible_text
from orchestrator.completion.retry import (
    BROKEN_OFF,
    NONSENSE,
    Limiter,
    Retryable,
    RetryPolicy,
    SpoiltSample,
    is_context_length,
    retry_after_s,
    with_retries,
)
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import AuthenticationError, CompletionError, CompletionTimeout, ContextLengthError
from orchestrator.types import Completion

MAX_BODY_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # of a streamed answer
CONNECT_TIMEOUT_S = 10.0
_JSON = {"Content-Type": "application/json"}
UNTOLD = -1  # a dialect whose servers may not say how long the prompt was
ROUNDING = 1e-6  # a log-prob above zero by less than this is a rounding error


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer as a dialect read it, before it is checked.

    `prompt_ids`: what the server says it was given. `text`: the ids as the server decodes them, used
    to find out at the start whether both sides have the same tokenizer. `sampled_tokens`: how many ids
    the server says it sampled.
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

        Raises KeyError, TypeError, IndexError, ValueError for anything else than it expects.
        """


class HttpClient:
    """One endpoint's connections. Errors come as Retryable, CompletionError, ContextLengthError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    @property
    def root(self) -> str:
        """The server without the OpenAI prefix."""
        return self.endpoint.base_url.rstrip("/").removesuffix("/v1")

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            if self.endpoint.api_key and urlsplit(self.endpoint.base_url).username is not None:
                raise AuthenticationError(
                    f"the endpoint {self.endpoint.shown} has credentials in its address and a key besides; "
                    "leave one of them out"
                )
            headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=0),  # the sandbox budget is the limit
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=1 << 18,
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
        async with self._request("GET", path, None, timeout_s, headers) as response:
            return await self._json(response)

    async def post(
        self,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> Any:
        async with self._request("POST", path, body, timeout_s, headers) as response:
            return await self._json(response, max_bytes)

    async def stream(
        self,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> list[Any]:
        """All events of a server-sent stream, `[DONE]` left out."""
        events: list[Any] = []
        size = 0
        # llama.cpp hangs up after a stream without saying so: the next request must not meet that.
        closing = {**(headers or {}), "Connection": "close"}
        async with self._request("POST", path, body, timeout_s, closing) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise Retryable(f"no event stream: {self._short(await self._text(response))}")
            async for line in response.content:
                size += len(line)
                if size > max_bytes or len(line) > MAX_LINE_BYTES:
                    raise CompletionError(f"an answer over {max_bytes} bytes")
                if line.startswith(b"error:"):
                    raise self._refusal(500, self._short(line.decode("utf-8", "replace")), None)
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    events.append(_loads(data))
        return events

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self.session().request(
                method,
                f"{self.root}{path}",
                data=None if body is None else orjson.dumps(body, default=list),
                headers=headers if body is None else {**_JSON, **(headers or {})},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                if response.status >= 400:
                    text = self._short(await self._text(response))
                    raise self._refusal(response.status, text, response.headers.get("retry-after"))
                yield response
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, and nothing was asked yet
            raise Retryable(f"connection failed: none within {CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise CompletionTimeout(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            text = self._short(str(error) or type(error).__name__)
            raise Retryable(f"connection failed: {text}") from error

    def _refusal(self, status: int, text: str, after: str | None) -> Exception:
        if status in (401, 403):
            what = "the key" if self.endpoint.api_key else "a request without a key"
            return AuthenticationError(
                f"the endpoint {self.endpoint.shown} refuses {what} (HTTP {status}: {text}); "
                "set --openai.api_key or OPENAI_API_KEY"
            )
        if is_context_length(status, text):
            return ContextLengthError(text)
        if status in (408, 409, 425, 429) or status >= 500:
            return Retryable(f"HTTP {status}: {text}", retry_after_s(after), status)
        return Refusal(f"HTTP {status}: {text}")

    async def _json(self, response: aiohttp.ClientResponse, max_bytes: int = MAX_BODY_BYTES) -> Any:
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > max_bytes:
                raise CompletionError(f"an answer over {max_bytes} bytes")
        return _loads(bytes(body))

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        """The beginning of an error: more of it is not looked at."""
        return (await response.content.read(MAX_ERROR_BYTES)).decode("utf-8", "replace")

    def _short(self, text: str) -> str:
        return self.endpoint.redact(text)


class Unreadable(Retryable):
    """Somebody answers, but no JSON."""


class WrongTokenizer(CompletionError):
    """The endpoint's model has another tokenizer than ours."""


class IdCompleter:
    """Completions of one endpoint that takes ids, in one dialect."""

    takes_ids = True

    def __init__(
        self,
        dialect: Dialect,
        client: HttpClient,
        tokenizer: HubTokenizer,
        retry: RetryPolicy | None = None,
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
        """One request before the first task. Raises WrongTokenizer besides what `call` raises."""
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
        """As the server gave it, and checked. Raises Retryable for what is none: null for a list, a list for a
        number."""
        try:
            sampled = await self._sampled(request, timeout_s, headers)
            return sampled, self._checked(sampled, request)
        except NONSENSE as error:
            raise Retryable(f"an answer that is none of {self.dialect.name}: {type(error).__name__}") from error

    async def _sampled(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> Sampled:
        send = self._client.stream if self.dialect.streams else self._client.post
        body = self.dialect.body(request, self.endpoint.model)
        max_bytes = min(MAX_BODY_BYTES, answer_bytes(request))
        answer = await send(self.dialect.path, body, timeout_s=timeout_s, headers=headers, max_bytes=max_bytes)
        return self.dialect.read(answer)

    def _checked(self, sampled: Sampled, request: CompletionRequest) -> Completion:
        prompt = request.prompt_ids or ids_of()
        ids = tuple(sampled.ids)
        # Whole lists at a time: one by one these checks were a fifth of all a completion costs here.
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
        text, visible = visible_text(self._tokenizer, ids[:known], request.stop)
        completion = Completion(
            text=text,
            visible=visible,
            finish_reason=finish_reason,
            tokens_T=ids[:known],
            logprobs_T=logprobs[:known],
            prompt_tokens=len(prompt),
            completion_tokens=max(1, len(ids)),
            policy_version=sampled.policy_version,
        )
        if known < len(ids):
            raise SpoiltSample(f"an id outside the tokenizer's {self._tokenizer.size}", completion)
        if not ids:
            raise SpoiltSample("an empty answer", completion)
        if finish_reason == "content_filter":
            raise UnusableSample(f"a sample that ended by {sampled.finish_reason[:40]!r}", completion)
        return completion

    def _known(self, ids: tuple[int, ...]) -> int:
        """How many of the first ids the tokenizer has. A model may have more rows than its tokenizer has ids, and
        sample one of those: no text can be made of it, and servers refuse it in a prompt."""
        if max(ids, default=0) < self._tokenizer.size:
            return len(ids)
        return next(place for place, token in enumerate(ids) if token >= self._tokenizer.size)


def finished_by(reason: object) -> Literal["stop", "length", "content_filter"]:
    """Why a sample ended. Raises Retryable where the server says no reason, or that it gave up itself."""
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    if not isinstance(reason, str) or reason.lower() in BROKEN_OFF:
        raise Retryable(f"an answer that ended by {str(reason)[:40]!r}")
    return "content_filter"


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable("an answer that is no JSON") from error


def version_text(value: Any) -> str | None:
    """A policy version as the server tells it, bounded. TypeError: it is no text and no number."""
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError("a policy version that is none")
    return None if value is None else str(value)[:200]


def _number(value: int | None) -> int:
    """What stands in a message. Raises TypeError for what only should have been a number."""
    if not isinstance(value, int):
        raise TypeError("a number that is none")
    return value
