"""A real HTTP server on a loopback port that speaks as much of the hub's protocol as fetching a dataset takes.

async with FakeHub({"someone/some-data": {"README.md": b"..."}}) as hub:
    hub.members = {"hf_member"}          # who may read the files; None: everybody
    ...hub.url, hub.fetched, hub.asked...

As at the real one, what a gated repository lists is public and its files are not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

Tree = Mapping[str, bytes]


class FakeHub:
    """Serves trees, path → content. `listed` adds sizes of files that are listed and nothing else."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = dict(trees)
        self.listed: dict[str, int] = {}
        self.members: set[str] | None = None
        self.strangers: set[str] = set()  # accounts that exist, without access
        self.torn: dict[str, int] = {}  # path → bytes after which the connection is cut, once
        self.stalled: dict[str, asyncio.Event] = {}  # path → set when it is asked for; the answer never comes
        self.asked: list[str] = []
        self.fetched: Counter[str] = Counter()  # bodies sent, by path
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """What goes into HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    def commit(self, repository: str) -> str:
        """Changes with the tree, as a commit does."""
        tree = self.trees[repository]
        return hashlib.sha1(repr(sorted(tree.items())).encode()).hexdigest()

    async def __aenter__(self) -> Self:
        app = web.Application()
        repository = "/{owner}/{name}"
        app.router.add_get(f"/api/datasets{repository}", self._info)
        app.router.add_get(f"/api/datasets{repository}/revision/{{revision}}", self._info)
        app.router.add_get(f"/api/datasets{repository}/tree/{{revision}}", self._tree)
        app.router.add_get(f"/datasets{repository}/resolve/{{revision}}/{{path:.+}}", self._resolve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request, gated=False)) is not None:
            return refusal
        repository = _repository(request)
        siblings = [{"rfilename": path, "size": size, "blobId": "0"} for path, size in self._sizes(repository)]
        return web.json_response({"id": repository, "sha": self.commit(repository), "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request, gated=False)) is not None:
            return refusal
        entries: list[dict[str, Any]] = [
            {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(path.encode()).hexdigest()}
            for path, size in self._sizes(_repository(request))
        ]
        return web.json_response(entries)

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request, gated=True)) is not None:
            return refusal
        repository, path = _repository(request), unquote(request.match_info["path"])
        content = self.trees[repository].get(path)
        if content is None:
            return _refused(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.commit(repository)}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        if path in self.stalled:
            self.stalled[path].set()
            await asyncio.Event().wait()  # until the client is gone
        self.fetched[path] += 1
        if (end := self.torn.pop(path, None)) is None:
            return web.Response(headers=headers, body=content)
        answer = web.StreamResponse(headers={**headers, "Content-Length": str(len(content))})
        await answer.prepare(request)
        await answer.write(content[:end])
        assert request.transport is not None
        request.transport.close()
        return answer

    def _sizes(self, repository: str) -> list[tuple[str, int]]:
        tree = self.trees[repository]
        return [*((path, len(content)) for path, content in tree.items()), *self.listed.items()]

    def _refusal(self, request: web.Request, *, gated: bool) -> web.Response | None:
        self.asked.append(f"{request.method} {request.path}")
        repository, revision = _repository(request), request.match_info.get("revision", "main")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        known = (self.members or set()) | self.strangers
        if token and self.members is not None and token not in known:
            return _refused(401, None, "Invalid credentials in Authorization header")
        if repository not in self.trees:
            return _refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if revision not in ("main", self.commit(repository)):
            return _refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if gated and self.members is not None and token not in self.members:
            return _refused(403 if token else 401, "GatedRepo", f"Access to dataset {repository} is restricted.")
        return None


def _repository(request: web.Request) -> str:
    return f"{request.match_info['owner']}/{request.match_info['name']}"


def _refused(status: int, code: str | None, message: str) -> web.Response:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=headers)
