"""When an endpoint refuses: parameters left out by name, keys taken out of its text, only its beginning read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.chat_answer import _count
from orchestrator.completion.http import HttpClient
from orchestrator.errors import CompletionError
from orchestrator.types import Message, Sampling, Wishes

ANSWER: dict[str, Any] = {
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "two"}}]
}
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=1)


@asynccontextmanager
async def refusing(
    says: Callable[[dict[str, Any]], str | None], answer: dict[str, Any] = ANSWER
) -> AsyncIterator[ChatCompleter]:
    """An endpoint that answers HTTP 400 with what `says` makes of a request, unless that is None."""

    async def chat(request: web.Request) -> web.Response:
        text = says(await request.json())
        if text is None:
            return web.json_response(answer)
        return web.json_response({"error": {"message": text}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    completer = ChatCompleter(HttpClient(Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")))
    try:
        yield completer
    finally:
        await completer.aclose()
        await runner.cleanup()


def asked(content: str) -> CompletionRequest:
    return CompletionRequest((Message("user", content),), None, (), SAMPLING, "r", "t", 0, 1)


async def test_half_a_character_is_no_text() -> None:
    """A server may cut one in two where a completion ends; no tokenizer takes that."""
    half = {"choices": [{**ANSWER["choices"][0], "message": {"role": "assistant", "content": "hi \ud83d"}}]}
    async with refusing(lambda body: None, half) as completer:
        assert (await completer.sample(asked("Hi!"))).text == "hi \ufffd"


async def test_a_conversation_arrives_as_it_is_with_every_parameter() -> None:
    bodies: list[dict[str, Any]] = []
    async with refusing(lambda body: bodies.append(body)) as completer:
        await completer.sample(asked("1 + 1?"))
    assert bodies[0]["messages"] == [{"role": "user", "content": "1 + 1?"}]
    assert bodies[0]["top_k"] == -1
    assert bodies[0]["seed"] == 1


async def test_a_parameter_refused_by_name_is_left_out_from_then_on() -> None:
    refused = "Unsupported parameter: 'min_p'."
    async with refusing(lambda body: refused if "min_p" in body else None) as completer:
        assert (await completer.sample(asked("1 + 1?"))).text == "two"
        assert completer.left_out == ("min_p",)


@pytest.mark.parametrize("name", ["seed", "logprobs", "top_k", "max_completion_tokens", "presence_penalty"])
@pytest.mark.parametrize("where", ["messages", "stop", "tools", "response_format"])
async def test_a_request_that_is_quoted_leaves_nothing_out(name: str, where: str) -> None:
    """A model, or code of it, could otherwise switch off log-probs, for all rollouts, by what it writes."""
    bodies: list[dict[str, Any]] = []
    tools = ({"type": "function", "function": {"name": "f", "description": f"the\n{name} of it"}},)
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {name: 1}}}
    told = {
        "messages": asked(f"{name} is unsupported"),
        "stop": replace(asked("1 + 1?"), stop=(name,)),
        "tools": replace(asked("1 + 1?"), wishes=Wishes(tools=tools)),
        "response_format": replace(asked("1 + 1?"), wishes=Wishes(response_format=form)),
    }

    def quote(body: dict[str, Any]) -> str:
        bodies.append(body)
        return f"cannot read: {body[where]}".replace("\\n", " ")

    async with refusing(quote) as completer:
        with pytest.raises(CompletionError):
            await completer.sample(told[where])
        assert completer.left_out == ()
        assert all("max_tokens" in body for body in bodies)


@pytest.mark.parametrize("at", [0, 290, 16_380, 16_384, 1 << 20])
def test_no_part_of_a_key_is_in_an_error_wherever_it_is_cut(at: int) -> None:
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m", api_key="a1b2c3d4e5f6")
    for filler in (" ", "\n", "x "):
        text = endpoint.redact((filler * at)[:at] + endpoint.api_key + " " + filler * at)
        assert len(text) <= 300
        assert "a1b2" not in text


@pytest.mark.parametrize(("told", "counted"), [(5, 5), (True, 0), (-1, 0), (1.5, 0), (None, 0), (10**30, 0)])
def test_a_count_of_tokens_that_could_not_be_read_back_is_not_recorded(told: object, counted: int) -> None:
    assert _count({"prompt_tokens": told}, "prompt_tokens") == counted


def test_no_credentials_of_an_address_are_in_an_error() -> None:
    text = Endpoint("http://127.0.0.1:1/v1", "m").redact("cannot reach http://me:geheim@example.org/v1?token=abc")
    assert text == "cannot reach http://example.org/v1?token=[key]"
