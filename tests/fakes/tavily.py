"""A real HTTP server on a loopback port that speaks Tavily's protocol, and fails on demand.

async with FakeTavily() as service:
    service.found = [a_result("https://example.com/a")]
    ...service.url, service.key, service.asked...
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

KEY = "tvly-dev-CANARY0123456789"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is sent instead of an answer. `cut`: the connection is closed without one."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    cut: bool = False


def refused(status: int, text: str = "") -> Fault:
    """An error as Tavily words it; the text echoes the key, as careless services do."""
    detail = {"detail": {"error": text or f"refused for key {KEY}"}}
    return Fault(status, json.dumps(detail).encode())


def a_result(url: str, title: str = "A title", content: str = "Some content.", **more: object) -> dict[str, Any]:
    """One search result."""
    return {"url": url, "title": title, "content": content, "score": 0.9, "raw_content": None, **more}


def a_page(url: str, raw_content: object = "The page's text.", **more: object) -> dict[str, Any]:
    """One extracted page."""
    return {"url": url, "raw_content": raw_content, "images": [], **more}


class FakeTavily:
    """Answers `found` to searches and `pages` to extractions; each of `faults` is used up by one request."""

    def __init__(self) -> None:
        self.key = KEY
        self.found: list[Any] = []
        self.pages: dict[str, dict[str, Any]] = {}
        self.faults: deque[Fault] = deque()
        self.failing: dict[str, Fault] = {}  # by query, or address
        self.slow: set[str] = set()  # queries that are never answered
        self.asked: list[Asked] = []
        self.gate = asyncio.Event()  # clear it, and requests wait
        self.gate.set()
        self.at_once = 0
        self.most_at_once = 0
        self.given_up = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """What goes into `env.tavily_base_url`."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/search", self._handle)
        app.router.add_post("/extract", self._handle)
        app.router.add_get("/usage", self._usage)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(Asked(request.path, body, dict(request.headers)))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            if body.get("query") in self.slow:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.at_once -= 1
        if self.faults:
            return self._fail(request, self.faults.popleft())
        if (fault := self.failing.get(str(body.get("query", body.get("urls"))))) is not None:
            return self._fail(request, fault)
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return self._fail(request, refused(401, "Unauthorized: missing or invalid API key."))
        return web.json_response(self._search(body) if request.path == "/search" else self._extract(body))

    async def _usage(self, request: web.Request) -> web.StreamResponse:
        if self.faults:
            return self._fail(request, self.faults.popleft())
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return self._fail(request, refused(401, "Unauthorized: missing or invalid API key."))
        told = {"plan_usage": 500, "plan_limit": 15_000, "current_plan": "Bootstrap"}
        return web.json_response({"key": {"usage": 150, "limit": 1000}, "account": told})

    def _fail(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.cut:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=fault.status, body=fault.body, headers=dict(fault.headers))

    def _search(self, body: Mapping[str, Any]) -> dict[str, Any]:
        results = self.found[: body.get("max_results", 5)]
        return {"query": body["query"], "answer": None, "images": [], "results": results, "response_time": 0.1}

    def _extract(self, body: Mapping[str, Any]) -> dict[str, Any]:
        page = self.pages.get(body["urls"])
        failed = [] if page else [{"url": body["urls"], "error": "Failed to fetch url"}]
        return {"results": [page] if page else [], "failed_results": failed, "response_time": 0.1}
