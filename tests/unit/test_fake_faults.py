"""The scripted inference server's faults, as a plain HTTP client meets them."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import aiohttp
import pytest

from tests.fakes.inference import Fault, Model, ScriptedServer, always
from tests.fakes.inference.client import a_body, ask, prompt_of, told
from tests.fakes.tokenizer import tokenizer_folder

PLAIN = "Thought: I add.\n<code>\nprint(1 + 1)\n</code>"
ID_DIALECTS = ("vllm", "sglang", "llamacpp", "atropos")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tokenizer_folder())


@pytest.mark.parametrize("dialect", [*ID_DIALECTS, "openai"])
@pytest.mark.parametrize("kind", ["400", "401", "403", "429", "500", "502", "503"])
async def test_status_faults(dialect: str, kind: Any, model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN), faults=(Fault(kind, times=1),)) as server:
        status, _ = await ask(server, a_body(dialect, prompt_of(model)))
        assert status == int(kind)
        assert (await ask(server, a_body(dialect, prompt_of(model))))[0] == 200
        assert [s.fault for s in server.log.completions] == [kind, None]
        assert len(server.log.completed) == 1


@pytest.mark.parametrize(("after", "header"), [(None, None), (1.5, "1.5")])
async def test_429_says_when_to_come_back_only_if_told_to(after: float | None, header: str | None) -> None:
    async with (
        ScriptedServer("openai", faults=(Fault("429", retry_after_s=after),)) as server,
        aiohttp.ClientSession() as session,
        session.post(f"{server.base_url}/chat/completions", json=a_body("openai", [])) as response,
    ):
        assert response.headers.get("Retry-After") == header


@pytest.mark.parametrize("dialect", [*ID_DIALECTS, "openai"])
async def test_reset_and_cut_off_answers_break_the_connection(dialect: str, model: Model) -> None:
    for kind in ("reset", "cut_off"):
        async with ScriptedServer(dialect, always(PLAIN), faults=(Fault(kind),)) as server:
            with pytest.raises(aiohttp.ClientError):
                await ask(server, a_body(dialect, prompt_of(model)))
            assert not server.log.completed


@pytest.mark.parametrize("dialect", [*ID_DIALECTS, "openai"])
async def test_garbage_is_no_json(dialect: str, model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN), faults=(Fault("garbage"),)) as server:
        with pytest.raises(json.JSONDecodeError):
            await ask(server, a_body(dialect, prompt_of(model)))


async def test_a_hung_call_never_answers_and_notes_that_the_client_left(model: Model) -> None:
    async with ScriptedServer("vllm", always(PLAIN), faults=(Fault("hang"),)) as server:
        asking = asyncio.create_task(ask(server, a_body("vllm", prompt_of(model))))
        async with asyncio.timeout(120):
            while not server.log.completions:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while not server.log.completions[0].disconnected:
                await asyncio.sleep(0.01)
        assert (server.log.completions[0].status, server.log.completed) == (None, [])


async def test_a_slow_answer_comes_whole(model: Model) -> None:
    async with ScriptedServer("vllm", always(PLAIN), faults=(Fault("slow", after_s=0.05),)) as server:
        status, _ = await ask(server, a_body("vllm", prompt_of(model)))
        (served,) = server.log.completed
    assert status == 200
    assert served.ended_s is not None
    assert served.ended_s - served.started_s >= 0.05


def sound(dialect: str, answer: Any) -> bool:
    """Whether an answer has ids, and a log-prob for each."""
    try:
        ids, logprobs, *_ = told(dialect, answer)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return 0 < len(ids) == len(logprobs)


@pytest.mark.parametrize("dialect", ID_DIALECTS)
async def test_answers_that_are_not_as_they_should_be(dialect: str, model: Model) -> None:
    async def spoilt(kind: Any) -> Any:
        async with ScriptedServer(dialect, always(PLAIN), faults=(Fault(kind),)) as server:
            status, answer = await ask(server, a_body(dialect, prompt_of(model)))
            assert status == 200
            assert len(server.log.completions[0].sampled_ids) == len(server.log.completions[0].logprobs) > 1
            assert not server.log.completed
            return answer

    # Where ids come with their log-probs in pairs there are fewer of both.
    assert sound(dialect, await spoilt("fewer_logprobs")) == (dialect in ("sglang", "atropos"))
    assert not sound(dialect, await spoilt("missing_logprobs"))
    assert not sound(dialect, await spoilt("empty_choices"))
    ids, logprobs, *_ = told(dialect, await spoilt("foreign_ids"))
    assert max(ids) >= model.size
    assert len(ids) == len(logprobs)
    _, logprobs, *_ = told(dialect, await spoilt("nan_logprob"))
    assert math.isnan(logprobs[0])
    _, logprobs, *_ = told(dialect, await spoilt("positive_logprob"))
    assert logprobs[0] > 0
    text = json.dumps(await spoilt("null_content"))
    assert any(null in text for null in ('"text": null', '"text": [null]', '"content": null'))


async def test_chat_answers_that_are_not_as_they_should_be(model: Model) -> None:
    async def spoilt(kind: Any) -> Any:
        async with ScriptedServer("openai", always(PLAIN), faults=(Fault(kind),)) as server:
            return (await ask(server, a_body("openai", [])))[1]

    assert (await spoilt("empty_choices"))["choices"] == []
    assert (await spoilt("null_content"))["choices"][0]["message"]["content"] is None
    assert (await spoilt("missing_logprobs"))["choices"][0]["logprobs"]["content"] is None
    assert math.isnan((await spoilt("nan_logprob"))["choices"][0]["logprobs"]["content"][0]["logprob"])
    assert (await spoilt("wrong_count"))["usage"]["prompt_tokens"] == len(prompt_of(model)) - 1
