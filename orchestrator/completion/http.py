"""The one HTTP client for inference endpoints: every request has a deadline, every answer a bound.

What is posted, and what an answer means, is up to the dialects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.retry import (
    ConnectionFailed,
    ForeignAnswer,
    Retryable,
    is_context_length,
    retry_after_s,
)
from orchestrator.errors import AuthenticationError, CompletionError, CompletionTimeout, ContextLengthError

MAX_BODY_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # of a streamed answer
CONNECT_TIMEOUT_S = 10.0
NOT_IMPLEMENTED = 501  # the server says that it will never do this
# A server that is not there yet, or no more. A peer that speaks no HTTP, or has the wrong certificate, is another.
_NO_CONNECTION = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    OSError,
    asyncio.IncompleteReadError,
)
_WRONG_PEER = (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)
_JSON = {"Content-Type": "application/json"}


class Unreadable(Retryable):
    """The answer is no JSON."""


class HttpClient:
    """One endpoint's connections. Its calls raise Retryable, Refusal, AuthenticationError, ContextLengthError and
    CompletionError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def root(self) -> str:
        """The server without the OpenAI prefix."""
        return self.endpoint.base_url.rstrip("/").removesuffix("/v1")

    @property
    def openai(self) -> str:
        """The prefix of OpenAI's API in the operator's address: `/v1` or nothing."""
        return self.endpoint.base_url.rstrip("/")[len(self.root) :]

    def session(self) -> aiohttp.ClientSession:
        if self._closed:  # a question that completions share outlives them
            raise ConnectionFailed("the connections were closed", asked=False)
        if self._session is None:
            if self.endpoint.api_key and urlsplit(self.endpoint.base_url).username is not None:
                raise AuthenticationError(
                    f"the endpoint {self.endpoint.shown} has credentials in its address and a key besides; "
                    "leave one of them out"
                )
            key = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
            self._session = aiohttp.ClientSession(
                # A few compressed bytes can be gigabytes: the bytes that are counted must be those that are kept.
                headers={"Accept-Encoding": "identity", **key},
                auto_decompress=False,
                proxy=_proxy(self.endpoint),
                connector=aiohttp.TCPConnector(limit=0),  # the sandbox budget is the limit
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=1 << 18,
            )
        return self._session

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(
        self,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> Any:
        async with self._request("GET", path, None, timeout_s, headers) as response:
            return await self._json(response, max_bytes)

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
        # llama.cpp closes the connection after a stream without saying so: it must not be used again.
        closing = {**(headers or {}), "Connection": "close"}
        async with self._request("POST", path, body, timeout_s, closing) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ForeignAnswer(f"no event stream: {self._short(await self._text(response))}")
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
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise CompletionError("a compressed answer, though it was asked for a plain one")
                if response.status >= 400:
                    text = self._short(await self._text(response))
                    raise self._refusal(response.status, text, response.headers.get("retry-after"))
                yield response
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, but no request was sent yet
            text = f"connection failed: none within {CONNECT_TIMEOUT_S:g} s"
            raise ConnectionFailed(text, asked=False) from error
        except TimeoutError as error:
            raise CompletionTimeout(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            text = f"connection failed: {self._short(str(error) or type(error).__name__)}"
            if isinstance(error, _NO_CONNECTION) and not isinstance(error, _WRONG_PEER):
                asked = not isinstance(error, aiohttp.ClientConnectorError)
                raise ConnectionFailed(text, asked=asked) from error
            raise Retryable(text) from error

    def _refusal(self, status: int, text: str, after: str | None) -> Exception:
        if status in (401, 403):
            what = "the key" if self.endpoint.api_key else "a request without a key"
            return AuthenticationError(
                f"the endpoint {self.endpoint.shown} refuses {what} (HTTP {status}: {text}); "
                "set --openai.api_key or OPENAI_API_KEY"
            )
        if is_context_length(status, text):
            return ContextLengthError(text)
        if status in (408, 409, 425, 429) or (status >= 500 and status != NOT_IMPLEMENTED):
            return Retryable(f"HTTP {status}: {text}", retry_after_s(after), status)
        return Refusal(f"HTTP {status}: {text}", status)

    async def _json(self, response: aiohttp.ClientResponse, max_bytes: int) -> Any:
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > max_bytes:
                raise CompletionError(f"an answer over {max_bytes} bytes")
        return _loads(bytes(body))

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        """The beginning of an error; the rest is not read."""
        return (await response.content.read(MAX_ERROR_BYTES)).decode("utf-8", "replace")

    def _short(self, text: str) -> str:
        return self.endpoint.redact(text)


def _proxy(endpoint: Endpoint) -> str | None:
    """The environment's proxy for a hosted service. Other servers are asked directly."""
    parts = urlsplit(endpoint.base_url)
    if not endpoint.hosted or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        try:
            return json.loads(data)  # slower, but takes the half character with which some servers end a text
        except (ValueError, RecursionError) as error:
            raise Unreadable("an answer that is no JSON") from error
