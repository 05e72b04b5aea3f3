"""A Docker Engine on a socket of its own that has no containers and answers whatever it is told to."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import TracebackType

from aiohttp import web

_VERSION = {"ApiVersion": "1.43"}


class OddEngine:
    """`async with OddEngine(path) as engine`: DOCKER_HOST is `engine.url`.

    `answers`: what a call's path is answered with, as JSON, by the end of that path; `refusals`: why it is not.
    What is put into `events` is sent to whoever follows them.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.answers: dict[str, object] = {"/version": _VERSION, "/containers/json": []}
        self.asked: list[str] = []  # method and path of every call
        self.refusals: dict[str, str] = {}
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self._path = path

    async def __aenter__(self) -> OddEngine:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if re.fullmatch(r"/v[\d.]+/events", request.path):
            return await self._tell(request)
        for end, why in self.refusals.items():
            if request.path.endswith(end):
                return web.json_response({"message": why}, status=500)
        for end, answer in self.answers.items():
            if request.path.endswith(end):
                return web.json_response(answer)
        return web.json_response({"message": "page not found"}, status=404)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        while True:
            await stream.write(json.dumps(await self.events.get()).encode() + b"\n")
