"""Something that answers in the run-api's place, in shapes and sizes that no run-api has."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from orchestrator.atropos.run_api import (
    MAX_ANSWER_BYTES,
    RunApi,
    RunApiAway,
    RunApiRefused,
    Status,
    fingerprint,
)
from orchestrator.atropos.terms import Terms

STATUS = {"current_step": 3, "queue_size": 2}


@asynccontextmanager
async def answering(tmp_path: Path, **answer: object) -> AsyncIterator[RunApi]:
    """A run-api that says the same to every call; `answer`: of web.Response."""

    async def handle(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(**answer)  # type: ignore[arg-type]

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "run-api")).start()
    try:
        connector = aiohttp.UnixConnector(str(tmp_path / "run-api"))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield RunApi("http://run-api", session)
    finally:
        await runner.cleanup()


async def _register(api: RunApi) -> object:
    return await api.register(Terms("env", group_size=2, max_token_length=1, workers=1, worker_timeout_s=60.0))


CALLS: dict[str, Callable[[RunApi], Awaitable[object]]] = {
    "register": _register,
    "trainer": lambda api: api.trainer(),
    "status": lambda api: api.status(0),
    "waiting": lambda api: api.waiting(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("body", ["{}", "[]", "null", "7", "no JSON", ""])
async def test_an_answer_of_another_shape_is_refused_in_one_line(tmp_path: Path, call: str, body: str) -> None:
    async with answering(tmp_path, text=body) as api:
        with pytest.raises(RunApiRefused, match=r"^http://run-api/\S+ is no run-api: it answers '.*'$"):
            await CALLS[call](api)


@pytest.mark.parametrize("body", ["[]", "null", '{"overrides": [7]}'])
async def test_a_latest_example_of_another_shape_is_refused(tmp_path: Path, body: str) -> None:
    async with answering(tmp_path, text=body) as api:
        with pytest.raises(RunApiRefused, match="is no run-api"):
            await api.latest()


async def test_an_answer_without_an_end_is_read_to_the_limit_only(tmp_path: Path) -> None:
    long = json.dumps(STATUS | {"more": "x" * MAX_ANSWER_BYTES})
    async with answering(tmp_path, text=long) as api:
        with pytest.raises(RunApiRefused, match=f"more than {MAX_ANSWER_BYTES} bytes"):
            await api.status(0)


async def test_the_latest_example_may_be_as_long_as_a_group(tmp_path: Path) -> None:
    group = {"env_id": 4, "tokens": [[100_000] * MAX_ANSWER_BYTES], "overrides": [{"rollout_id": "a"}]}
    async with answering(tmp_path, text=json.dumps(group)) as api:
        assert await api.latest() == (4, fingerprint(group))


def test_a_fingerprint_tells_groups_apart_and_not_how_they_were_brought() -> None:
    group = {"tokens": ((1, 2), (3,)), "overrides": [{"rollout_id": "a"}, {"rollout_id": "b"}], "scores": [1, 0]}
    brought = json.loads(json.dumps({**group, "env_id": 3, "advantages": None}))
    assert fingerprint(group) == fingerprint(brought)
    others = [
        {"tokens": [[1, 2], [4]]},
        {"overrides": [{"rollout_id": "a"}, {"rollout_id": "c"}]},
        {"overrides": None},
    ]
    assert len({fingerprint({**group, **other}) for other in [{}, *others]}) == 4


async def test_a_packed_answer_is_not_unpacked(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(STATUS).encode())
    async with answering(tmp_path, body=packed, headers={"Content-Encoding": "gzip"}) as api:
        with pytest.raises(RunApiRefused, match="answers in gzip"):
            await api.status(0)


@pytest.mark.parametrize(("status", "kind"), [(422, RunApiRefused), (502, RunApiAway)])
async def test_of_a_long_error_page_the_beginning_is_told(
    tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    page = "<h1>\nnot  here</h1>" + "x" * 2 * MAX_ANSWER_BYTES
    async with answering(tmp_path, text=page, status=status) as api:
        with pytest.raises(kind) as refused:
            await api.status(0)
    assert str(refused.value).startswith(f"http://run-api/status-env answers {status}: <h1> not here</h1>x")
    assert len(str(refused.value)) < 400


async def test_what_a_run_api_says_is_read(tmp_path: Path) -> None:
    async with answering(tmp_path, text=json.dumps(STATUS)) as api:
        assert await api.status(0) == Status(step=3, queued=2, own_queued=0, unallocated=1.0)
        assert await api.waiting() == 2
