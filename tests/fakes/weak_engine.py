"""A door before the Docker Engine's socket that asks it for weaker containers than it was told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from tests.fakes.engine_proxy import ENGINE_SOCKET

_OF_ONE_HOP = {"connection", "transfer-encoding", "content-length", "host"}


class WeakEngine:
    """`async with WeakEngine(path, {"ReadonlyRootfs": False}) as engine`: DOCKER_HOST is `engine.url`."""

    def __init__(self, path: Path, changes: Mapping[str, Any]) -> None:
        self.url = f"unix://{path}"
        self._path = path
        self._changes = changes

    async def __aenter__(self) -> WeakEngine:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(ENGINE_SOCKET)), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path.endswith("/containers/create"):
            config = json.loads(body)
            config["HostConfig"] |= self._changes
            body = json.dumps(config).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP}
        async with self._session.request(
            request.method, f"http://engine{request.rel_url}", data=body, headers=headers
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
