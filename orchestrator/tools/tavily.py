"""The search service behind the web tools: the only module that uses Tavily's client and the key.

Its answers are untrusted: their size is bounded while they are read, and their texts are cleaned. Errors have
texts of our own, as those of an HTTP client may hold headers with the key.
"""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import tavily
import tavily.errors

from orchestrator.errors import ToolError
from orchestrator.network import proxy_of, trust
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.redact import Secret
from orchestrator.rules.waits import running_timeout
from orchestrator.tools.bounded import IDENTITY, AnswerTooLarge, bound

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
MAX_EXTRACT_TIMEOUT_S = 60.0  # the service accepts no longer timeout
ATTEMPTS = 3
BETWEEN_ATTEMPTS = Backoff(first_s=0.5, most_s=2.0, spread=0.5)
_NOT_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ufffd]")
_BINARY_SHARE = 0.05  # more of such characters: not a text


class ServiceFailed(Exception):
    """No usable answer. `passing`: another attempt may succeed."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


class ServiceDown(ServiceFailed):
    """The service serves no request: because of key, quota, rate or server, not of a page or a query."""


class PageUnreadable(Exception):
    """The service works, but the page cannot be read: it does not exist, has no text, or refuses access."""


@dataclass(frozen=True, slots=True)
class Page:
    """A search result, or a page that was read. `url`: where the service found it, after redirects."""

    title: str
    url: str
    content: str
    date: str | None = None


class Tavily:
    """At most `max_calls` calls at a time over all rollouts, each within `timeout_s`, retries included."""

    def __init__(
        self, key: Secret, *, base_url: str, timeout_s: float, max_calls: int, backoff: Backoff = BETWEEN_ATTEMPTS
    ) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._slots = asyncio.Semaphore(max_calls)
        self._key_refused = False
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=IDENTITY,
            limits=httpx.Limits(max_connections=max_calls),
            proxy=proxy_of(base_url),
            verify=trust() if base_url.startswith("https:") else True,
            trust_env=False,  # the two above are all of the environment
            event_hooks={"response": [bound(MAX_BODY_BYTES)]},
        )
        self._client = tavily.AsyncTavilyClient(api_key=key.reveal(), api_base_url=base_url, client=self._http)

    async def aclose(self) -> None:
        """Closes the connections. Idempotent."""
        await self._http.aclose()

    async def search(self, query: str, max_results: int, max_chars: int) -> list[Page]:
        """Results with texts of at most `max_chars` each. Raises ServiceFailed, ToolError."""
        answer = await self._ask(
            lambda: self._client.search(
                query, search_depth="advanced", max_results=max_results, timeout=self._timeout_s
            )
        )
        return [
            Page(
                title=self._clean(result.get("title"), 1_000) or "No title",
                url=self._clean(result.get("url"), 4_000),
                content=self._clean(result.get("content"), max_chars),
                date=self._clean(result.get("published_date"), 100) or None,
            )
            for result in _results(answer)[:max_results]
        ]

    async def extract(self, url: str, max_chars: int) -> Page:
        """One page with a text of at most `max_chars`. Raises ServiceFailed, PageUnreadable, ToolError."""
        answer = await self._ask(
            lambda: self._client.extract(
                url,
                include_images=False,
                extract_depth="basic",
                timeout=min(self._timeout_s, MAX_EXTRACT_TIMEOUT_S),
            )
        )
        results = _results(answer)
        if not results:
            raise PageUnreadable("nothing could be extracted from it")
        content = self._clean(results[0].get("raw_content"), max_chars)
        if not content.strip():
            raise PageUnreadable("it has no text")
        if len(_NOT_TEXT.findall(content[:10_000])) > _BINARY_SHARE * min(len(content), 10_000):
            raise PageUnreadable("it is not text")
        title = self._clean(results[0].get("title"), 1_000) or "Unknown title"
        return Page(title, self._clean(results[0].get("url"), 4_000) or url, content)

    async def usage(self) -> str:
        """How much of the account is used up, in words; empty if the service does not say. Costs no credit.

        `GET /usage` of https://docs.tavily.com/documentation/api-reference/endpoint/usage. Raises ServiceFailed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.get(
                    "/usage", headers={"Authorization": f"Bearer {self._key.reveal()}"}, timeout=self._timeout_s
                )
        except (TimeoutError, httpx.HTTPError, AnswerTooLarge):
            raise ServiceDown("the web service cannot be reached") from None
        if answer.status_code in (401, 403):
            raise ServiceDown("the web service does not accept the key")
        if answer.status_code >= 500:
            raise ServiceDown(f"the web service answered with HTTP {answer.status_code}")
        try:
            account = answer.json()["account"]
            credits_used, limit = int(account["plan_usage"]), int(account["plan_limit"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""  # a gateway in front of the service, or a plan without a limit
        return f"{credits_used} of {limit} credits of the plan are used"

    async def _ask(self, call: Callable[[], Awaitable[Any]]) -> Mapping[str, Any]:
        """The service's answer. Raises ServiceFailed, ToolError."""
        async with self._slots:
            try:
                async with running_timeout(self._timeout_s):
                    failures = 0
                    while True:
                        try:
                            return await self._once(call)
                        except ServiceFailed as failure:
                            failures += 1
                            if not failure.passing or failures == ATTEMPTS:
                                raise
                        await asyncio.sleep(self._backoff.pause_s(failures, random.random()))  # noqa: S311
            except TimeoutError:
                raise ServiceFailed(f"the web service did not answer within {self._timeout_s:g} seconds") from None

    async def _once(self, call: Callable[[], Awaitable[Any]]) -> Mapping[str, Any]:
        try:
            answer = await call()
        except tavily.InvalidAPIKeyError:
            if not self._key_refused:
                self._key_refused = True
                log.error(
                    "Tavily refuses the key: web_search and visit_page fail in every rollout until "
                    "--tavily-api-key or TAVILY_API_KEY is a valid one"
                )
            raise ServiceDown("the web service does not accept the orchestrator's key") from None
        except tavily.UsageLimitExceededError:
            raise ServiceDown("the web service is overloaded; try again later", passing=True) from None
        except tavily.errors.ForbiddenError:
            raise ServiceDown("the web service refuses to serve the orchestrator's account") from None
        except tavily.BadRequestError:
            raise ToolError("the web service does not accept this request") from None
        except tavily.errors.TimeoutError:
            raise TimeoutError from None
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise ServiceDown(f"the web service answered with HTTP {status}", passing=status >= 500) from None
        except httpx.HTTPError:
            raise ServiceDown("the web service cannot be reached", passing=True) from None
        except AnswerTooLarge:
            raise ServiceFailed("the web service sent more than is read") from None
        except (ValueError, TypeError, AttributeError, RecursionError):
            # Raised by the client for no JSON, no object, or a status that is neither error nor success.
            raise ServiceFailed("the web service sent an answer that cannot be read") from None
        if not isinstance(answer, Mapping) or not isinstance(answer.get("results"), list):
            raise ServiceFailed("the web service sent an answer that cannot be read")
        return answer

    def _clean(self, value: object, max_chars: int) -> str:
        """Text of the service made encodable and bounded, and without the key, which a page might echo."""
        if not isinstance(value, str):
            return ""
        text = value.replace(self._key.reveal(), "[key]")
        if len(text) > max_chars:
            text = f"{text[:max_chars]}\n[cut: {len(text) - max_chars} more characters]"
        return text.encode("utf-8", "replace").decode("utf-8")


def _results(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result for result in answer["results"] if isinstance(result, Mapping)]
