"""`web_search` and `visit_page`, with names, inputs and outputs of the predecessor's tools. They run on the host.

Wrong arguments, a denied query or page, and a service that does not work are ToolErrors: the agent's code gets an
exception. A page that cannot be read is a result with `success` False, as in the predecessor.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from orchestrator.errors import ToolError, ToolServiceError
from orchestrator.rules.control import CACHE_S, Control
from orchestrator.tools.addresses import MAX_ADDRESS_CHARS, web_address
from orchestrator.tools.arguments import check_names, text_argument, whole_argument
from orchestrator.tools.base import HostTool
from orchestrator.tools.rules import WebRules
from orchestrator.tools.tavily import PageUnreadable, ServiceDown, ServiceFailed, Tavily

MAX_QUERY_CHARS = 395  # the service takes 400, and a year may be added
MAX_RESULTS = 20
MAX_RESULT_CHARS = 10_000  # of one result's text, which is in the result twice
MAX_PAGE_CHARS = 200_000
PLAIN_QUERY, PLAIN_PAGE = "weather", "https://example.com/"  # of the control questions
_DEFAULT_RESULTS = 10
_YEARS = (1900, 2100)


class _WebTool(ABC):
    """What the two tools share: the service, the rules, and deciding whose fault a failure is."""

    def __init__(self, service: Tavily, rules: WebRules, *, fail_rollouts: bool = False) -> None:
        self._service = service
        self._rules = rules
        self._fail_rollouts = fail_rollouts
        self._control = Control(self._plain)

    @abstractmethod
    async def _plain(self) -> str:
        """The control question: a plain call of this tool. Raises ServiceFailed."""

    async def _failure(self, failure: ServiceFailed) -> ToolError | ToolServiceError:
        """The error to raise. An agent can cause failures on purpose, by slow or huge answers: so a rollout ends
        as `tool_error` only if the control fails too."""
        if not self._fail_rollouts or (control := await self._control.answer(age_s=CACHE_S)).served:
            return ToolError(str(failure))
        return ToolServiceError(f"{failure}; {control.remark()}")


class WebSearch(_WebTool):
    """`web_search(query, num_results, filter_year)`."""

    description = (
        "Perform a web search query and return the search results.\n\n"
        "Returns an array of search result objects, each containing:\n"
        "- title: The title of the search result\n"
        "- url: The URL of the search result\n"
        "- content: The text content from the search result\n"
        "- snippet: A text snippet from the content (same as content)\n"
        "- date: The publication date if available (may be null)"
    )
    inputs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "query": {"type": "string", "description": "The web search query to perform."},
        "num_results": {
            "type": "integer",
            "description": f"Number of results to return (default: {_DEFAULT_RESULTS}, at most {MAX_RESULTS})",
            "nullable": True,
        },
        "filter_year": {"type": "string", "description": "Filter results to a specific year", "nullable": True},
    }
    output_type = "array"

    async def _plain(self) -> str:
        return f"{len(await self._service.search(PLAIN_QUERY, 1, MAX_QUERY_CHARS))} results"

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The results as a JSON list. Raises ToolError, ToolServiceError."""
        check_names(arguments, self.inputs)
        query = " ".join(text_argument(arguments, "query", MAX_QUERY_CHARS).split())
        count = whole_argument(arguments, "num_results", 1, MAX_RESULTS) or _DEFAULT_RESULTS
        year = whole_argument(arguments, "filter_year", *_YEARS)
        if year is not None:
            query = f"{query} {year}"
        if self._rules.deny_query(query):
            raise ToolError("this query is not allowed")
        try:
            pages = await self._service.search(query, count, MAX_RESULT_CHARS)
        except ServiceFailed as failure:
            raise await self._failure(failure) from None
        return json.dumps(
            [
                {
                    "title": page.title,
                    "url": page.url,
                    "content": page.content,
                    "snippet": page.content,
                    "date": page.date,
                }
                for page in pages
                if await self._may_be_shown(page.url, page.title, page.content)
            ],
            ensure_ascii=False,
        )

    async def _may_be_shown(self, url: str, *texts: str) -> bool:
        try:
            web_address(url)
        except ToolError:
            return False
        return not (self._rules.deny_address(url) or await asyncio.to_thread(self._rules.deny_text, *texts))


class VisitPage(_WebTool):
    """`visit_page(url)`."""

    description = (
        "Visit a webpage at a given URL and extract its content.\n\n"
        "Returns an object containing:\n"
        "- url: The URL that was visited\n"
        "- title: The title of the webpage\n"
        "- content: The full text content of the webpage\n"
        "- success: Boolean indicating if the extraction was successful\n"
        "- error: Error message if extraction failed (null if successful)"
    )
    inputs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "url": {"type": "string", "description": "The URL to visit"}
    }
    output_type = "object"

    async def _plain(self) -> str:
        try:
            return (await self._service.extract(PLAIN_PAGE, MAX_QUERY_CHARS)).title
        except PageUnreadable as reason:
            return str(reason)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The page as a JSON object. Raises ToolError, ToolServiceError."""
        check_names(arguments, self.inputs)
        given_address = text_argument(arguments, "url", MAX_ADDRESS_CHARS)
        address = web_address(given_address)
        if self._rules.deny_address(address):
            raise ToolError("this page is not allowed")
        try:
            page = await self._service.extract(address, MAX_PAGE_CHARS)
        except PageUnreadable as reason:
            return _unreadable(given_address, str(reason))
        except ServiceDown as failure:
            raise await self._failure(failure) from None
        except ServiceFailed as failure:
            # Slow, huge or odd pages cause such failures too, so an agent could choose them.
            return _unreadable(given_address, str(failure))
        # A redirect may have led elsewhere.
        try:
            web_address(page.url)
        except ToolError:
            raise ToolError("this page leads to a place that cannot be visited") from None
        denied = await asyncio.to_thread(self._rules.deny_text, page.title, page.content)
        if denied or self._rules.deny_address(page.url):
            raise ToolError("this page is not allowed")
        return _object(page.url, page.title, page.content, None)


def web_tools(service: Tavily, rules: WebRules, *, fail_rollouts: bool = False) -> dict[str, HostTool]:
    """The tools by name. `fail_rollouts`: a service that fails ends the rollout."""
    return {
        "web_search": WebSearch(service, rules, fail_rollouts=fail_rollouts),
        "visit_page": VisitPage(service, rules, fail_rollouts=fail_rollouts),
    }


def _unreadable(url: str, reason: str) -> str:
    content = f"This page could not be read: {reason}. Try another source for this information."
    return _object(url, "Page not read", content, reason)


def _object(url: str, title: str, content: str, error: str | None) -> str:
    page = {"url": url, "title": title, "content": content, "success": error is None, "error": error}
    return json.dumps(page, ensure_ascii=False)
