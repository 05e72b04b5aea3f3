"""A proxy before Atropos' run-api that breaks deliveries when it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


class FaultyRunApi:
    """Hands every call on; `faults` are what becomes of the next deliveries: `HOW before` the run-api has heard of
    them, or `HOW after` it has taken them, HOW being a status, `reset` or `hang`; `STATUS late`: it hears of them
    a moment after the answer; a status alone is one before; nothing: no fault."""

    LATE_S = 0.5

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None  # what happens before the fault is noticed
        self.waiting = 0  # calls that hang
        self.closed = False  # every call is answered by 502
        self.closed_behind = False  # the last of `faults`
        self.url = ""
        self._late: set[asyncio.Task[object]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FaultyRunApi]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        delivery = request.path.startswith("/scored_data")
        fault = self.faults.pop(0) if delivery and self.faults else ""
        how, _, when = fault.partition(" ")
        if self.closed:
            return web.Response(status=502, text="closed")
        if how and when in ("", "before"):
            return await self._broken(request, fault, how)
        body = await request.read()  # unpacked by aiohttp
        if when == "late":
            task = asyncio.create_task(self._later(request, body))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            return await self._broken(request, fault, how)
        answer = await self._handed_on(request, body)
        if how:
            return await self._broken(request, fault, how)
        self.done[fault] += 1
        return answer

    async def _handed_on(self, request: web.Request, body: bytes) -> web.Response:
        kept = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept-encoding")}
        async with self._session.request(
            request.method, self.target + request.path, data=body, headers=kept
        ) as answer:
            text = await answer.read()
            encoding = {"Content-Encoding": e} if (e := answer.headers.get("Content-Encoding")) else {}
            return web.Response(
                status=answer.status, body=text, headers=encoding, content_type=answer.content_type
            )

    async def settled(self) -> None:
        """Everything that was late is there."""
        await asyncio.gather(*self._late)

    async def _later(self, request: web.Request, body: bytes) -> None:
        await asyncio.sleep(self.LATE_S)
        await self._handed_on(request, body)

    async def _broken(self, request: web.Request, fault: str, how: str) -> web.Response:
        if self.meanwhile is not None and not how.isdecimal():
            await self.meanwhile()
        self.done[fault] += 1
        self.closed |= self.closed_behind and not self.faults
        if how.isdecimal():
            return web.Response(status=int(how), text=f"told to answer {how}")
        if how == "hang":
            self.waiting += 1
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
