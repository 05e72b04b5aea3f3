"""Serves the report of the run under way (`env.view_port`): read-only, to whoever has the token of its address."""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.host.base import Hosts
from orchestrator.report.live import LiveReport
from orchestrator.report.page import as_block
from orchestrator.rules.observer import Observer
from orchestrator.telemetry.listen import listening

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_GONE = "This address is not that of a run under way. `orchestrator` prints the present one when a run begins.\n"


@asynccontextmanager
async def live_page(
    address: str, run_directory: Path, observer: Observer, hosts: Callable[[], Hosts | None]
) -> AsyncIterator[str]:
    """Serves the page within this block, and yields its URL. Raises EnvironmentUnusable."""
    page = _LivePage(run_directory, observer, hosts)
    application = web.Application(middlewares=[page.guard])
    application.router.add_get("/", page.html)
    application.router.add_get("/update", page.update)
    application.router.add_get("/rollout", page.rollout)
    async with listening(application, address, "env.view_port") as place:
        yield f"http://{place}/?token={page.token}"


class _LivePage:
    def __init__(self, run_directory: Path, observer: Observer, hosts: Callable[[], Hosts | None]) -> None:
        self.token = secrets.token_urlsafe(16)  # only who was told it can read the run
        self._began = time.time()
        self._observer = observer
        self._hosts = hosts
        self._report = LiveReport(run_directory, lambda: None if (there := hosts()) is None else there.tokenizer)

    @web.middleware
    async def guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Refuses every request without the token."""
        token = request.query.get("token", "")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return web.Response(status=403, text=_GONE, headers=_HEADERS)
        response: web.StreamResponse = await handler(request)
        return response

    async def html(self, _: web.Request) -> web.Response:
        """The page, without data."""
        body = await asyncio.to_thread(self._report.page)
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def update(self, request: web.Request) -> web.Response:
        """What is new since the version that the page has, and how the run stands now."""
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) < 16):
            return web.Response(status=400, text="since: a version that this page was given\n", headers=_HEADERS)
        state = self._state()
        return _json(
            await asyncio.to_thread(lambda: as_block({**self._report.update(int(since)), "state": state}))
        )

    async def rollout(self, request: web.Request) -> web.Response:
        """One rollout step by step; null where it is not known."""
        name = request.query.get("id", "")
        return _json(await asyncio.to_thread(lambda: as_block(self._report.details(name))))

    def _state(self) -> dict[str, Any]:
        hosts = self._hosts()
        return {
            "now": time.time(),
            "began": self._began,
            "wanted": self._observer.wanted,
            "waiting": hosts.waiting if hosts is not None else 0,
            "hosts": {name: asdict(host) for name, host in hosts.now().items()} if hosts is not None else {},
        }


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=_HEADERS)
