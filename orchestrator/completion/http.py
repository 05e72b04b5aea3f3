"""The one HTTP client for inference endpoints: every request has a deadline, every answer a bound.

What is posted, and what an answer means, is up to the dialects.
"""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
import orjson

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.retry import ConnectionFailed, ForeignAnswer, Retryable
from orchestrator.completion.statuses import error_in, failure
from orchestrator.errors import AuthenticationError, CompletionError, CompletionTimeout
from orchestrator.network import proxy_of, trust
from orchestrator.rules.redact import redact

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # of a streamed answer
CONNECT_TIMEOUT_S = 10.0
SAME_METHOD = (307, 308)  # redirects that keep a request as it is; behind others a POST becomes a GET
MAX_REDIRECTS = 5
# A server that is not there yet, or no more. A peer that speaks no HTTP, or has the wrong certificate, is another.
_NO_CONNECTION = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError, asyncio.IncompleteReadError)
_WRONG_PEER = (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)
_JSON = {"Content-Type": "application/json"}


class Limits(TypedDict):
    """Of one request: its deadline, and most bytes of its answer (MAX_BODY_BYTES)."""

    timeout_s: float
    headers: NotRequired[Mapping[str, str] | None]
    max_bytes: NotRequired[int]


class Unreadable(Retryable):
    """The answer is no JSON."""


class HttpClient:
    """One endpoint's connections. Its calls raise Retryable, Refusal, AuthenticationError, ContextLengthError and
    CompletionError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        # The environment is read once for an address: it costs a tenth of what a completion does.
        self._way_to = lru_cache(maxsize=64)(_way_to)

    @property
    def openai(self) -> str:
        """The prefix of OpenAI's API in the operator's address: `/v1` or nothing."""
        return "/v1" if urlsplit(self.endpoint.base_url).path.rstrip("/").endswith("/v1") else ""

    def url(self, path: str) -> str:
        return _url(self.endpoint.base_url, path)

    def session(self) -> aiohttp.ClientSession:
        if self._closed:  # a question that completions share outlives them
            raise ConnectionFailed("the connections were closed", sent=False)
        if self._session is None:
            if self.endpoint.api_key and urlsplit(self.endpoint.base_url).username is not None:
                raise AuthenticationError(
                    f"the endpoint {self.endpoint.shown} has credentials in its address and a key besides; "
                    "leave one of them out"
                )
            key = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
            if "authorization" in map(str.lower, self.endpoint.headers):
                key = {}
            self._session = aiohttp.ClientSession(
                # A few compressed bytes can be gigabytes: the bytes that are counted must be those that are kept.
                headers={"Accept-Encoding": "identity", **key, **self.endpoint.headers},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),  # a balancer's cookie would send everything to one server
                # The sandbox budget is the limit.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=1 << 18,
            )
        return self._session

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, **limits: Unpack[Limits]) -> Any:
        return await self._answer("GET", path, None, **limits)

    async def post(self, path: str, body: Any, **limits: Unpack[Limits]) -> Any:
        answer = await self._answer("POST", path, body, **limits)
        self._demand_no_error(answer)
        return answer

    async def _answer(self, method: str, path: str, body: Any, **limits: Unpack[Limits]) -> Any:
        async def whole(response: aiohttp.ClientResponse) -> Any:
            most = limits.get("max_bytes", MAX_BODY_BYTES)
            return self._loads(b"".join([chunk async for chunk in _chunks(response, most)]))

        return await self._request(method, path, body, limits["timeout_s"], limits.get("headers"), whole)

    async def stream(self, path: str, body: Any, **limits: Unpack[Limits]) -> list[Any]:
        """All events of a server-sent stream, `[DONE]` left out."""

        async def events(response: aiohttp.ClientResponse) -> list[Any]:
            found: list[Any] = []
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                text = await self._text(response)
                with suppress(ValueError):
                    self._demand_no_error(orjson.loads(text))
                raise ForeignAnswer(f"no event stream: {self.endpoint.redact(text)}")
            async for line in _lines(response, limits.get("max_bytes", MAX_BODY_BYTES)):
                if line.startswith(b"error:"):
                    raise failure(self.endpoint, 500, line.decode("utf-8", "replace"))
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    found.append(self._loads(data))
                    self._demand_no_error(found[-1])
            return found

        # llama.cpp closes the connection after a stream without saying so: it must not be used again.
        closing = {**(limits.get("headers") or {}), "Connection": "close"}
        return await self._request("POST", path, body, limits["timeout_s"], closing, events)

    def quote(self, answer: Any) -> str:
        """The beginning of an answer that is not as it should be, for an error's text."""
        try:
            return self.endpoint.redact(orjson.dumps(answer)[:4_096].decode("utf-8", "replace"), 200)
        except TypeError:  # half a character, or a number of many digits
            return ""

    def _demand_no_error(self, answer: Any) -> None:
        """Raises what an error means that came with HTTP 200."""
        if (error := error_in(answer)) is not None:
            status, words = error
            text = orjson.dumps(words, default=str).decode() if not isinstance(words, str) else words
            raise failure(self.endpoint, status, text, label="HTTP 200 with an error")

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        """What `read` makes of the answer."""
        data = None if body is None else orjson.dumps(body, default=_ids, option=orjson.OPT_SERIALIZE_NUMPY)
        url, session = self.url(path), self.session()
        redirects = 0
        try:
            while True:
                async with session.request(
                    method,
                    url,
                    data=data,
                    headers=headers if data is None else {**_JSON, **(headers or {})},
                    timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                    allow_redirects=False,
                    **self._way_to(url),
                ) as response:
                    target = urljoin(url, response.headers.get("location", ""))
                    if (
                        response.status in SAME_METHOD
                        and redirects < MAX_REDIRECTS
                        and self._may_follow(url, target)
                    ):
                        url, redirects = target, redirects + 1
                        continue
                    if 300 <= response.status < 400 and "location" in response.headers:
                        raise self._moved(response.status, path, target)
                    if response.status >= 300:
                        text = await self._text(response)
                        response.close()  # the next try may reach another server behind the same address
                        raise failure(
                            self.endpoint, response.status, text, after=response.headers.get("retry-after")
                        )
                    if _encoding(response):
                        raise CompletionError("a compressed answer, though it was asked for a plain one")
                    return await read(response)
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, but no request was sent yet
            text = f"connection failed: none within {CONNECT_TIMEOUT_S:g} s"
            raise ConnectionFailed(text, sent=False) from error
        except TimeoutError as error:
            raise CompletionTimeout(f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientHttpProxyError as error:
            text = f"the proxy {redact(str(proxy_of(url)))} refuses the connection: HTTP {error.status}"
            if error.status >= 500:
                raise ConnectionFailed(text, sent=False) from error
            raise Refusal(text, error.status) from error
        except _WRONG_PEER as error:
            raise Retryable(f"connection failed: {self._why_wrong(error)}") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            text = f"connection failed: {self.endpoint.redact(str(error) or type(error).__name__)}"
            if isinstance(error, _NO_CONNECTION):
                sent = not isinstance(error, aiohttp.ClientConnectorError)
                raise ConnectionFailed(text, sent=sent) from error
            raise Retryable(text) from error

    def _may_follow(self, url: str, target: str) -> bool:
        """Whether a redirect that keeps the request is followed: to the same server, or to its encrypted side, and
        elsewhere if the request holds no key."""
        old, new = urlsplit(url), urlsplit(target)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            return False
        address = self.endpoint.shown  # without credentials and keys in its query
        has_key = self.endpoint.api_key or self.endpoint.headers or address != self.endpoint.base_url
        upgraded = old.hostname == new.hostname and (old.scheme, new.scheme) == ("http", "https")
        return not has_key or _server(old) == _server(new) or upgraded

    def _moved(self, status: int, path: str, target: str) -> Refusal:
        parts = urlsplit(target)
        base = (
            parts._replace(path=parts.path.removesuffix(path) + self.openai)
            if parts.path.endswith(path)
            else parts
        )
        there = f"redirects to {self.endpoint.redact(base.geturl())}"
        advice = "if completions are served there, set --openai.base_url to it"
        return Refusal(f"HTTP {status}: the endpoint {self.endpoint.shown} {there}; {advice}", status)

    def _why_wrong(self, error: Exception) -> str:
        """Why the peer's encryption is not taken, and what to do."""
        why = self.endpoint.redact(str(getattr(error, "certificate_error", None) or error))
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ServerFingerprintMismatch) or (
            "certificate" in why.lower()
        ):
            return (
                f"the certificate of {self.endpoint.shown} is not trusted: {why}; for an authority of your own, "
                "name its certificate in SSL_CERT_FILE"
            )
        return f"{self.endpoint.shown} does not speak TLS as https:// needs it: {why}"

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        """The beginning of an error; the rest is not read. Some gateways compress their errors unasked."""
        data = await response.content.read(MAX_ERROR_BYTES)
        if _encoding(response) in ("gzip", "deflate"):
            with suppress(zlib.error):
                data = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, MAX_ERROR_BYTES)
        return data.decode("utf-8", "replace")

    def _loads(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except ValueError:
            try:
                return json.loads(data)  # slower, but takes the half character with which some servers end a text
            except (ValueError, RecursionError) as error:
                begins = self.endpoint.redact(data[:4_096].decode("utf-8", "replace"), 100)
                raise Unreadable(f"the answer is not JSON: {begins!r}") from error


def _ids(ids: Any) -> Any:
    """An array of ids as orjson writes it without an object for each: a prompt has thousands."""
    import numpy  # slow to import; a tokenizer has imported it before there are ids

    return numpy.asarray(ids)


@lru_cache(maxsize=256)
def _url(base: str, path: str) -> str:
    """The address of a path of the server: the operator's without OpenAI's prefix, with its query behind."""
    parts = urlsplit(base)
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1") + path, fragment="").geturl()


def _encoding(response: aiohttp.ClientResponse) -> str:
    """How the body is compressed; empty: it is plain."""
    return response.headers.get("content-encoding", "").strip().lower().removeprefix("identity")


def _way_to(url: str) -> dict[str, Any]:
    """The proxy and the certificates for this URL, which may be another than the operator's behind a redirect."""
    proxy = proxy_of(url)
    encrypted = any(address.startswith("https:") for address in (url, proxy or ""))
    return {"proxy": proxy, "ssl": trust() if encrypted else True}


async def _chunks(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    """The answer as it comes. Raises CompletionError for more than `max_bytes`."""
    size = 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > max_bytes:
            raise CompletionError(f"an answer over {max_bytes} bytes")
        yield chunk


async def _lines(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    """The same line by line. aiohttp's own lines end at twice its buffer, with an error that tells nothing."""
    rest = bytearray()
    async for chunk in _chunks(response, max_bytes):
        rest += chunk
        if b"\n" in chunk:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
        if len(rest) > MAX_LINE_BYTES:
            raise CompletionError(f"a line over {MAX_LINE_BYTES} bytes in a streamed answer")
    if rest:
        yield bytes(rest)


def _server(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
