"""How a request of chat is sent: by which name, beside the event loop or in it, with which bound of its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from aiohttp import web

from orchestrator.completion.base import LONG_CHARS, Endpoint, Refusal
from orchestrator.completion.chat import LONG_TALK, ChatCompleter
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import ConnectionFailed
from orchestrator.completion.versions import Attribution
from orchestrator.errors import CompletionError
from orchestrator.rules.policy import Policy
from orchestrator.types import Message
from tests.unit.test_refused_parameters import ONCE, TALK, Strict, error, request, serving


async def test_the_model_is_asked_for_by_the_trainers_name_for_it() -> None:
    policy = Policy()
    async with serving(Strict()) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "base")), ONCE, Attribution(policy))
        await completer.sample(request())
        await policy.serve("7", "base-7")
        await completer.sample(request())
        await completer.aclose()
    assert [body["model"] for body in bodies] == ["base", "base-7"]


@pytest.mark.parametrize("status", [402, 404, 410])
async def test_a_status_that_no_text_causes_teaches_nothing(status: int) -> None:
    """There is a system message, which a template might have refused, in whatever words."""
    async with serving(Strict(lambda body: (status, error("nothing here")))) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        with pytest.raises(CompletionError, match="nothing here") as caught:
            await completer.sample(request())
        await completer.aclose()
    assert not (isinstance(caught.value, Refusal) and caught.value.of_text)
    assert [body["messages"][-1]["content"] for body in bodies] == [TALK[-1].content], "no control"


class Threads(Mapping[str, Any]):
    """Fields of an endpoint. Notes the threads in which requests are written with them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __iter__(self) -> Iterator[str]:
        self.names.append(threading.current_thread().name.partition("_")[0])
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)


MANY = tuple(Message("user" if place % 2 else "assistant", "so") for place in range(LONG_TALK))


@pytest.mark.parametrize(
    ("talk", "thread"),
    [
        (TALK, "MainThread"),
        (MANY, "MainThread"),
        ((*MANY, Message("user", "so")), "aside"),
        ((Message("user", "x" * LONG_CHARS),), "MainThread"),
        ((Message("user", "x" * (LONG_CHARS + 1)),), "aside"),
    ],
    ids=["short", "many", "too many", "long", "too long"],
)
async def test_a_long_conversation_is_written_beside_the_event_loop(
    talk: tuple[Message, ...], thread: str
) -> None:
    threads = Threads()
    async with serving(Strict()) as (address, _):
        endpoint = Endpoint(address, "m", chat_extras=cast("Any", threads))
        completer = ChatCompleter(HttpClient(endpoint), ONCE)
        await completer.sample(request(messages=talk))
        await completer.aclose()
    assert set(threads.names) == {thread}


async def test_an_answer_without_a_bound_of_its_own_ends_at_64_mib() -> None:
    """A list of models, or what llama.cpp makes of a text: nobody can say how long it may be."""
    sent = 0

    async def endless(asked: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(asked)
        while sent < 256:
            await response.write(b" " * (1 << 20))
            sent += 1
        return response

    app = web.Application()
    app.router.add_get("/v1/models", endless)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = HttpClient(Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m"))
    try:
        with pytest.raises(CompletionError, match=f"an answer over {64 << 20} bytes"):
            await client.get("/v1/models", timeout_s=60.0)
    finally:
        await client.aclose()
        await runner.cleanup()
    assert 60 < sent < 80, "what is on its way besides is a few MiB"


async def test_a_parameter_is_found_behind_a_long_text() -> None:
    """The error that people see is cut before it."""
    words = "the request cannot be served. " * 100 + "top_k is not supported"
    async with serving(Strict(lambda body: (500, error(words)) if "top_k" in body else None)) as (address, _):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        assert (await completer.sample(request())).text == "two"
        assert completer.left_out == ("top_k",)
        await completer.aclose()


async def test_a_closed_client_holds_no_connection_and_opens_none() -> None:
    async with serving(Strict()) as (address, _):
        client = HttpClient(Endpoint(address, "m"))
        await client.get("/v1/models", timeout_s=60.0)
        session = client.session()
        assert not session.closed
        await client.aclose()
        assert session.closed
        with pytest.raises(ConnectionFailed, match="closed"):
            await client.get("/v1/models", timeout_s=60.0)
        await client.aclose()
