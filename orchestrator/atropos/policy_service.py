"""Where a trainer says which weights it serves: `POST /policy` with `{"version": "7", "model": "policy-v7"}`.

`model` is for endpoints that have each version under a name of its own, such as LoRA adapters. `GET /policy` tells
what was said last.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

from orchestrator.errors import ConfigError
from orchestrator.rules.policy import Policy
from orchestrator.telemetry.listen import listening

MOST_BYTES = 64 << 10


@asynccontextmanager
async def policy_service(address: str, policy: Policy, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Listens at HOST:PORT within this block. Raises EnvironmentUnusable where nothing can listen there."""

    async def state(request: web.Request) -> web.Response:
        return web.json_response({"version": policy.served.version, "model": policy.served.model})

    async def serve(request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # what a web page may send unasked is of another type
            return _refused(415, "the body must be of the type application/json")
        try:
            body = orjson.loads(await request.read())
        except ValueError:
            return _refused(400, "the body is no JSON")
        if not isinstance(body, dict) or not {"version"} <= body.keys() <= {"version", "model"}:
            return _refused(400, 'the body must be of the form {"version": "7"} or {"version": "7", "model": "m"}')
        before = policy.served
        try:
            await policy.serve(body["version"], body.get("model"))
        except ConfigError as error:
            return _refused(400, str(error))
        if (served := policy.served) != before:
            named = f", asked for as {served.model}" if served.model else ""
            say(f"the policy is version {served.version} now{named}")
        return await state(request)

    application = web.Application(client_max_size=MOST_BYTES)
    application.add_routes([web.get("/policy", state), web.post("/policy", serve)])
    async with listening(application, address, "env.policy_address"):
        yield


def _refused(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
