"""When a chat endpoint's refusal is looked into: once for all that wait, and not where it can teach nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.chat import ChatCompleter, trial
from orchestrator.completion.connect import connect
from orchestrator.completion.http import HttpClient
from orchestrator.errors import ParameterError
from orchestrator.types import Message, Wishes
from tests.unit.test_refused_parameters import (
    ONCE,
    SAMPLING,
    TALK,
    Strict,
    error,
    gemini,
    no_system,
    request,
    serving,
    unsupported,
)

EXTRA = "top_k"
FIRST, SECOND = (request(messages=(*TALK, Message("user", text))) for text in ("first", "second"))


def completer_of(address: str) -> ChatCompleter:
    return ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)


def last(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


async def test_a_refusal_that_many_wait_for_is_looked_into_once() -> None:
    async with serving(Strict(lambda body: (400, error("bad request")) if EXTRA in body else None)) as (
        address,
        bodies,
    ):
        completer = completer_of(address)
        answers = await asyncio.gather(*(completer.sample(FIRST) for _ in range(8)))
        await completer.aclose()
    assert [answer.text for answer in answers] == ["two"] * 8
    controls = [body for body in bodies if last(body) != "first"]
    assert [EXTRA in body for body in controls] == [True, False]


async def test_what_was_learned_meanwhile_holds_for_a_request_that_was_refused_late() -> None:
    """Its own refusal says nothing, and others of its kind are served by then."""
    learned = asyncio.Event()

    async def chat(asked: web.Request) -> web.Response:
        body = await asked.json()
        if last(body) == "second" and EXTRA in body:
            await learned.wait()
        if EXTRA in body:
            return web.json_response(error("bad request"), status=400)
        message = {"role": "assistant", "content": "two"}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    completer = completer_of(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    try:
        async with asyncio.TaskGroup() as tg:
            late = tg.create_task(completer.sample(SECOND))
            assert (await completer.sample(FIRST)).text == "two"
            learned.set()
        assert late.result().text == "two"
    finally:
        await completer.aclose()
        await runner.cleanup()


async def test_a_redirect_teaches_nothing() -> None:
    """Whatever its address spells."""
    asked: list[str] = []

    async def moved(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPMovedPermanently(f"/{EXTRA}/chat/completions")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", moved)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    completer = completer_of(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    try:
        with pytest.raises(Refusal, match="redirects to"):
            await completer.sample(FIRST)
    finally:
        await completer.aclose()
        await runner.cleanup()
    assert asked == ["/v1/chat/completions"]


async def test_a_temperature_that_is_refused_later_is_the_parameters_fault() -> None:
    refused: list[bool] = []

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        fault = error("temperature is not supported", param="temperature")
        return (400, fault) if refused and "temperature" in body else None

    async with serving(Strict(says)) as (address, _):
        completer = completer_of(address)
        asked = replace(FIRST, sampling=replace(SAMPLING, temperature=0.7))
        assert (await completer.sample(asked)).text == "two"
        refused.append(True)
        with pytest.raises(ParameterError, match=r"--env\.temperature 1"):
            await completer.sample(asked)
        await completer.aclose()


async def test_a_refusal_without_a_word_of_why_is_the_text_s_where_others_of_its_kind_are_served() -> None:
    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (400, error("bad request")) if last(body) == "second" else None

    async with serving(Strict(says)) as (address, bodies):
        completer = completer_of(address)
        assert (await completer.sample(FIRST)).text == "two"
        with pytest.raises(Refusal, match="bad request"):
            await completer.sample(SECOND)
        await completer.aclose()
    assert [last(body) for body in bodies] == ["first", "second"], "no control"


async def test_a_control_that_a_busy_endpoint_does_not_answer_teaches_nothing() -> None:
    """Whatever it says while it is busy."""

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        if last(body) == "first":
            return None
        return (400 if last(body) == "second" else 503), error(f"busy: {EXTRA} is not supported")

    async with serving(Strict(says)) as (address, bodies):
        completer = completer_of(address)
        with pytest.raises(Refusal):
            await completer.sample(SECOND)
        assert len(bodies) == 2
        assert (await completer.sample(FIRST)).text == "two"
        await completer.aclose()
    assert EXTRA in bodies[-1]


async def test_a_control_whose_answer_is_all_thought_was_served() -> None:
    """A model that thinks first gives no text in so few tokens."""
    full = "Could not finish the message because max_tokens or model output limit was reached"

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        if EXTRA in body:
            return 400, error(f"{EXTRA} is not supported")
        return None if last(body) == "first" else (400, error(full))

    async with serving(Strict(says)) as (address, bodies):
        completer = completer_of(address)
        assert (await completer.sample(FIRST)).text == "two"
        await completer.aclose()
    assert [EXTRA in body for body in bodies] == [True, True, False, False]


async def test_one_refusal_in_the_probe_takes_all_that_is_not_openai_s() -> None:
    """It may ask twice, and some services name one parameter after the other."""
    async with serving(Strict(gemini)) as (address, bodies):
        completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING))
        probes = len(bodies)
        await completer.sample(FIRST)
        await completer.aclose()
    assert (probes, len(bodies)) == (2, 3)


async def test_what_is_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many refusals it takes to learn the rest, and however many kinds of requests."""
    wishes = Wishes(response_format={"type": "json_object"})

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        if "response_format" in body and "logprobs" in body:
            return 400, error("logprobs is not supported", param="logprobs")
        if len(body.get("stop") or ()) > 1:
            return 400, error("stop: only one is taken", param="stop")
        return no_system(body) or unsupported("seed")(body)

    async with serving(Strict(says)) as (address, _):
        completer = completer_of(address)
        for asked in (FIRST, replace(FIRST, wishes=wishes)):
            assert (await completer.sample(asked)).text == "two"
        await completer.aclose()
    warnings = [record.getMessage().removeprefix(f"{address} ") for record in caplog.records]
    assert [text.split(":")[0] for text in warnings] == [
        "does not know seed",
        "takes 1 stop strings",
        "takes no system message",
        "does not know logprobs",
    ]


@pytest.mark.parametrize("status", [400, 500])
async def test_tools_that_are_refused_with_any_status_are_a_note_of_the_probe(status: int) -> None:
    words = "tools are not supported by this model"
    service = Strict(lambda body: (status, error(words)) if "tools" in body else None)
    notes: list[str] = []
    async with serving(service) as (address, _):
        completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING, tools=True), notes=notes)
        await completer.aclose()
    assert [note.endswith("requests with tools will be refused") for note in notes].count(True) == 1


@pytest.mark.parametrize(
    "first",
    [
        (400, error("Could not finish the message because max_tokens or model output limit was reached")),
        (200, {"choices": []}),
    ],
)
async def test_a_first_probe_that_gets_no_text_ends_no_run(first: tuple[int, Any]) -> None:
    left = [first]
    async with serving(Strict(lambda body: left.pop() if left else None)) as (address, _):
        completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING))
        assert isinstance(completer, ChatCompleter)
        assert completer.left_out == ()
        await completer.aclose()
    assert not left
