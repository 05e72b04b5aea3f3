"""As much of a Weights & Biases server as its client needs for one run: the calls of wandb 0.31, seen on the wire.

A run is made by the GraphQL mutation `UpsertBucket`; metrics come as lines of `wandb-history.jsonl` to
`/files/ENTITY/PROJECT/RUN/file_stream`; other files are put where `CreateRunFiles` says.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ENTITY = "someone"


@dataclass(slots=True)
class WandbServer:
    """What it was told. `status`: what it answers instead, to every call."""

    status: int = 200
    url: str = ""
    keys: set[str] = field(default_factory=set)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[WandbServer]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/graphql", self._graphql)
        app.router.add_post("/files/{entity}/{project}/{run}/file_stream", self._stream)
        app.router.add_route("*", "/{path:.*}", self._anything)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _graphql(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self._heard(request)
        if self.status != 200:
            return web.json_response({"errors": [{"message": "told to"}]}, status=self.status)
        given = asked.get("variables") or {}
        match asked.get("operationName"):
            case "Viewer":
                data: dict[str, Any] = {
                    "viewer": {
                        "id": "1",
                        "entity": ENTITY,
                        "username": ENTITY,
                        "email": "",
                        "flags": "{}",
                        "teams": {"edges": []},
                    }
                }
            case "UpsertBucket":
                known = self.runs.setdefault(given["name"], {})
                known |= {key: value for key, value in given.items() if value is not None}
                project = {"id": "2", "name": given["project"], "entity": {"id": "3", "name": ENTITY}}
                bucket = {
                    "id": "4",
                    "name": given["name"],
                    "displayName": known.get("displayName"),
                    "description": None,
                    "config": None,
                    "sweepName": None,
                    "project": project,
                    "historyLineCount": 0,
                }
                data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in given["files"]]
                data = {"createRunFiles": {"runID": "4", "uploadHeaders": [], "files": files}}
            case "CreateArtifact":  # of a table; there already, so that no files follow
                sequence = {"id": "5", "name": given["input"]["artifactCollectionName"], "latestArtifact": None}
                artifact = {"id": "6", "state": "COMMITTED", "versionIndex": 0, "artifactSequence": sequence}
                data = {"createArtifact": {"artifact": artifact}}
            case _:
                data = {"project": None}  # of which an artifact is asked for
        return web.json_response({"data": data})

    async def _stream(self, request: web.Request) -> web.Response:
        told = await request.json()
        self._heard(request)
        if self.status != 200:
            return web.json_response({}, status=self.status)
        for line in told.get("files", {}).get("wandb-history.jsonl", {}).get("content", ()):
            self.history.append(json.loads(line))
        if told.get("complete"):
            self.ended[request.match_info["run"]] = told.get("exitcode", 0)
        return web.json_response({})

    async def _anything(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({}, status=self.status)

    def _heard(self, request: web.Request) -> None:
        self.calls += 1
        kind, _, packed = request.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            self.keys.add(base64.b64decode(packed).decode().partition(":")[2])
