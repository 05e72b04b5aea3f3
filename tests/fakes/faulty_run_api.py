"""A proxy before Atropos' run-api that breaks deliveries when it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


class FaultyRunApi:
    """Hands every call on; `faults` are what becomes of the next deliveries: a status, `reset before` the run-api
    has heard of it, `reset after`, or nothing."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None  # what happens before a reset is noticed
        self.url = ""

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
        self.done[fault] += 1
        if fault.isdecimal():
            return web.Response(status=int(fault), text=f"told to answer {fault}")
        if fault == "reset before":
            await self._meanwhile()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        body = await request.read()  # unpacked by aiohttp
        kept = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept-encoding")}
        async with self._session.request(
            request.method, self.target + request.path, data=body, headers=kept
        ) as answer:
            text = await answer.read()
            if fault == "reset after":
                await self._meanwhile()
                assert request.transport is not None
                request.transport.abort()
            encoding = {"Content-Encoding": e} if (e := answer.headers.get("Content-Encoding")) else {}
            return web.Response(
                status=answer.status, body=text, headers=encoding, content_type=answer.content_type
            )

    async def _meanwhile(self) -> None:
        if self.meanwhile is not None:
            await self.meanwhile()
