"""Serves the report of a run, under way or not: read-only, to whoever has the token of its address."""

import asyncio
import hmac
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from orchestrator.host.base import STILL_UNDER_WAY, Hosts, UnderWay
from orchestrator.report.live import MOST_GROUPS, LiveReport
from orchestrator.report.page import as_block
from orchestrator.rules.observer import Observer
from orchestrator.run.lenient import text
from orchestrator.run.line import attempt_line
from orchestrator.telemetry.listen import listening
from orchestrator.types import Attempt

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_GONE = "This is not the address of this report: `orchestrator` prints it when it begins to serve one.\n"
_LOCAL = {"localhost", "127.0.0.1", "::1"}
MOST_RUNNING = 100  # that are listed


@asynccontextmanager
async def live_page(
    address: str, run_directory: Path, observer: Observer, hosts: Callable[[], Hosts | None]
) -> AsyncIterator[str]:
    """Serves the page of a run under way within this block, and yields its URL. Raises EnvironmentUnusable."""
    began = time.time()

    def state() -> dict[str, Any]:
        there = hosts()
        return {
            "now": time.time(),
            "began": began,
            "wanted": observer.wanted,
            "waiting": there.waiting if there is not None else 0,
            "hosts": {name: asdict(host) for name, host in there.now().items()} if there is not None else {},
        }

    def opened() -> LiveReport:
        return LiveReport(run_directory, lambda: None if (there := hosts()) is None else there.tokenizer)

    async with served(opened, address, "env.view_port", state, hosts) as url:
        yield url


@asynccontextmanager
async def served(
    opened: Callable[[], LiveReport],
    address: str,
    setting: str,
    state: Callable[[], dict[str, Any]] | None = None,
    hosts: Callable[[], Hosts | None] = lambda: None,
) -> AsyncIterator[str]:
    """Serves a report at [HOST:]PORT within this block, and yields its URL. `opened`: opens it when it is read for
    the first time. `state`: how the run stands. Raises EnvironmentUnusable, which names the setting."""
    page = _Page(opened, address, state, hosts)
    application = web.Application(middlewares=[page.guard])
    for path, answer in (
        ("/", page.html),
        ("/update", page.update),
        ("/ended", page.ended),
        ("/groups", page.groups),
        ("/group", page.group),
        ("/rollout", page.rollout),
    ):
        application.router.add_get(path, answer)
    try:
        async with listening(application, address, setting) as place:
            yield f"http://{place}/?token={page.token}"
    finally:
        await page.close()


class _Page:
    def __init__(
        self,
        opened: Callable[[], LiveReport],
        address: str,
        state: Callable[[], dict[str, Any]] | None,
        hosts: Callable[[], Hosts | None],
    ) -> None:
        self.token = secrets.token_urlsafe(16)  # only who was told it can read the run
        host = address.rpartition(":")[0].strip("[]")
        self._is_local = not host or host in _LOCAL
        self._opened, self._state, self._hosts = opened, state, hosts
        self._report: asyncio.Future[LiveReport] | None = None

    async def close(self) -> None:
        if self._report is not None:
            await asyncio.to_thread((await self._report).close)

    @web.middleware
    async def guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Refuses every request without the token; and of this machine alone, those of pages that reached it by a
        name of their own."""
        token = request.query.get("token", "")
        is_told = hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())
        if not is_told or (self._is_local and urlsplit(f"//{request.host}").hostname not in _LOCAL):
            return web.Response(status=403, text=_GONE, headers=_HEADERS)
        try:
            response: web.StreamResponse = await handler(request)
        except (OSError, sqlite3.Error) as error:
            return web.Response(status=500, text=f"the index of the run: {error}\n", headers=_HEADERS)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n", headers=_HEADERS)
        return response

    async def html(self, _: web.Request) -> web.Response:
        """The page, without data."""
        body = await asyncio.to_thread((await self._open()).page)
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def update(self, _: web.Request) -> web.Response:
        """The run as a whole, how it stands now, and the rollouts under way."""
        report, state = await self._open(), None if self._state is None else self._state()
        running = [
            {"id": one.plan.rollout_id, "group": one.plan.group, "task": text(one.plan.task.question, 200)}
            | {"turns": one.turns, "seconds": one.elapsed_s}
            for one in self._under_way()[:MOST_RUNNING]
        ]
        began = 0.0 if state is None else state["began"]
        return await _json(lambda: {**report.update(began), "state": state, "running": running})

    async def ended(self, request: web.Request) -> web.Response:
        """Attempts that ended, for the panels."""
        report, after = await self._open(), _number(request, "after")
        return await _json(lambda: report.ended(after))

    async def groups(self, request: web.Request) -> web.Response:
        """A part of the table."""
        report, first, most = await self._open(), _number(request, "first"), _number(request, "most", MOST_GROUPS)
        return await _json(lambda: report.groups(request.query, first, most))

    async def group(self, request: web.Request) -> web.Response:
        """One group, by its number or one of its rollouts."""
        report, rollout = await self._open(), request.query.get("rollout", "")
        number = None if rollout else _number(request, "number")
        line = self._so_far(rollout, report)
        return await _json(lambda: report.group(request.query, number, rollout, line()))

    async def rollout(self, request: web.Request) -> web.Response:
        """One rollout step by step, as far as it is; null where it is not known."""
        report, name = await self._open(), request.query.get("id", "")
        line = self._so_far(name, report)
        return await _json(lambda: report.details(name, line()))

    async def _open(self) -> LiveReport:
        if self._report is None:
            self._report = asyncio.ensure_future(asyncio.to_thread(self._opened))
        try:
            return await asyncio.shield(self._report)
        except Exception:
            self._report = None  # the next request tries it again
            raise

    def _under_way(self) -> list[UnderWay]:
        there = self._hosts()
        return [] if there is None else sorted(there.under_way(), key=lambda one: one.plan.rollout_id)

    def _so_far(self, rollout_id: str, report: LiveReport) -> Callable[[], dict[str, Any] | None]:
        """Makes the line of a rollout under way, as far as it is known; it may be called in a thread. What this
        process itself holds of the rollout is taken now, on the event loop, where nothing changes it."""
        one = next((one for one in self._under_way() if one.plan.rollout_id == rollout_id), None)
        if one is None:
            return lambda: None
        attempt = None if one.attempt is None else one.attempt()

        def line() -> dict[str, Any] | None:
            if attempt is not None:
                return attempt_line(attempt)
            record = report.served(rollout_id)
            return None if record is None else attempt_line(Attempt(one.plan, record, STILL_UNDER_WAY))

        return line


def _number(request: web.Request, name: str, most: int = 1 << 53) -> int:
    """Raises ValueError."""
    given = request.query.get(name, "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 17 and int(given) <= most):
        raise ValueError(f"{name}: a whole number up to {most}")
    return int(given)


async def _json(answer: Callable[[], Any]) -> web.Response:
    body = await asyncio.to_thread(lambda: as_block(answer()))
    return web.Response(body=body, content_type="application/json", headers=_HEADERS)
