"""Whatever an endpoint answers is a completion or a failure of the endpoint: never a traceback, never a score."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest
from aiohttp import web

from orchestrator.completion.base import CompletionRequest, Endpoint, UnusableSample, ids_of
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.http import MAX_LINE_BYTES, HttpClient
from orchestrator.completion.ids import Dialect, IdCompleter
from orchestrator.completion.llamacpp import LlamaCppCompleter, LlamaCppDialect
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.vllm import VllmDialect
from orchestrator.errors import CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.outcome import Refused
from orchestrator.types import CompletionKind, Message, Sampling
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan
from tests.fakes.tokenizer import tokenizer_folder

ONCE = RetryPolicy(attempts=1, pauses=0)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=1)
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VLLM: dict[str, Any] = {
    "choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop", "text": "x"}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}
SGLANG: dict[str, Any] = {
    "text": "x",
    "meta_info": {
        "output_token_logprobs": [[-0.5, 5, None]], "finish_reason": {"type": "stop"}, "prompt_tokens": 2,
        "completion_tokens": 1,
    },
}  # fmt: skip
EVENT: dict[str, Any] = {
    "tokens": [5], "completion_probabilities": [{"logprob": -0.5}], "stop": True, "stop_type": "eos",
    "content": "x", "tokens_evaluated": 2, "tokens_predicted": 1,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "two"}}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}
NUMBERS = [True, -1, 2**31, 2**63, 1.5]
STRANGE = [None, [], {}, "", "x", *NUMBERS, [None], [[]], ["x"], [2**31], [-1], DEEP, {"a": DEEP}]


def changed(value: Any) -> list[Any]:
    """The answer with each of its values in turn replaced by each strange one."""
    if isinstance(value, dict):
        inner = [{**value, k: new} for k, v in value.items() for new in (*STRANGE, *changed(v))]
        return [*inner, *({k: v for k, v in value.items() if k != left_out} for left_out in value)]
    if isinstance(value, list) and value:
        return [[new, *value[1:]] for new in (*STRANGE, *changed(value[0]))]
    return []


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


class Answering:
    """An endpoint that answers every request with the same bytes."""

    def __init__(self) -> None:
        self.body = b""
        self.headers: dict[str, str] = {}
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=self.body, headers={"Content-Type": "application/json", **self.headers})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Answering]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("dialect", "kind", "usual"),
    [
        (VllmDialect(), IdCompleter, VLLM),
        (SglangDialect(), IdCompleter, SGLANG),
        (LlamaCppDialect(), LlamaCppCompleter, EVENT),
    ],
    ids=["vllm", "sglang", "llamacpp"],
)
async def test_ids_of_any_shape(
    dialect: Dialect, kind: type[IdCompleter], usual: dict[str, Any], tokenizer: HubTokenizer
) -> None:
    request = CompletionRequest((), ids_of([1, 2]), (), SAMPLING, "r", "t", 0, 1)
    async with Answering().running() as server:
        client = HttpClient(Endpoint(server.base_url, "m"))
        completer = kind(dialect, client, tokenizer, ONCE)
        if dialect.streams:
            server.headers["Content-Type"] = "text/event-stream"
        refused = 0
        for answer in (usual, *changed(usual)):
            server.body = b"data: %b\n\n" % orjson.dumps(answer) if dialect.streams else orjson.dumps(answer)
            told = None
            try:
                assert (await completer.sample(request)).tokens_T
            except CompletionError as error:
                told = str(error)
            assert told is None or len(told) < 400
            refused += told is not None
            with suppress(CompletionError):
                await completer.probe(request, 10.0)
        assert refused > 50
        await client.aclose()


async def test_chat_of_any_shape() -> None:
    request = CompletionRequest((Message("user", "1 + 1?"),), None, (), SAMPLING, "r", "t", 0, 1)
    with_logprobs = {**CHAT["choices"][0], "logprobs": {"content": [{"logprob": -0.5, "id": 5}]}, "token_ids": [5]}
    usual = {**CHAT, "choices": [with_logprobs], "weight_version": "v1"}
    async with Answering().running() as server:
        completer = ChatCompleter(HttpClient(Endpoint(server.base_url, "m")), ONCE)
        refused = 0
        for answer in (CHAT, usual, *changed(usual)):
            server.body = orjson.dumps(answer)
            told = None
            try:
                completion = await completer.sample(request)
            except CompletionError as error:
                told = str(error)
            assert told is None or len(told) < 400
            refused += told is not None
            if told is None:
                assert 1 <= completion.completion_tokens <= SAMPLING.max_tokens
                assert 0 <= completion.prompt_tokens < 2**31
                assert all(0 <= i < 2**31 for i in completion.tokens_T or ())
        assert refused > 20
        for body in (b"[" * 100_000, b'{"choices": ' + b"[" * 100_000, b"", b"null", b"\xff", b"1" * 5_000):
            server.body = body
            with pytest.raises(CompletionError):
                await completer.sample(request)
        await completer.aclose()


async def test_chat_that_is_longer_than_what_was_asked_for() -> None:
    request = CompletionRequest((Message("user", "1 + 1?"),), None, (), SAMPLING, "r", "t", 0, 1)
    async with Answering().running() as server:
        completer = ChatCompleter(HttpClient(Endpoint(server.base_url, "m")), ONCE)
        long = {**CHAT["choices"][0], "message": {"role": "assistant", "content": "x" * 100_000}}
        server.body = orjson.dumps({**CHAT, "choices": [long]})
        with pytest.raises(CompletionError, match="100000 characters where 8 tokens were asked for"):
            await completer.sample(request)
        server.body = gzip.compress(server.body)
        server.headers["Content-Encoding"] = "gzip"
        with pytest.raises(CompletionError, match="a compressed answer"):
            await completer.sample(request)
        await completer.aclose()


async def test_ids_that_are_longer_than_what_was_asked_for(tokenizer: HubTokenizer) -> None:
    request = CompletionRequest((), ids_of([1, 2]), (), SAMPLING, "r", "t", 0, 1)
    async with Answering().running() as server:
        client = HttpClient(Endpoint(server.base_url, "m"))
        server.body = orjson.dumps({**VLLM, "padding": "x" * (4 << 20)})
        with pytest.raises(CompletionError, match="an answer over 1081376 bytes"):
            await IdCompleter(VllmDialect(), client, tokenizer, ONCE).sample(request)
        await client.aclose()


async def test_an_address_with_credentials_and_a_key_is_refused_and_not_shown(tokenizer: HubTokenizer) -> None:
    endpoint = Endpoint("http://me:geheim@127.0.0.1:9/v1", "m", api_key="k")
    with pytest.raises(EnvironmentUnusable, match="leave one of them out") as refused:
        await connect(endpoint, tokenizer, tokens="exact")
    assert "geheim" not in str(refused.value)


async def test_a_completion_that_fails_in_a_way_nobody_foresaw_is_no_fault_of_the_policy() -> None:
    """Left to gRPC it would look to the sandbox like a crash of its own, which is scored."""
    lease = Lease(a_plan(), ScriptedCompleter([ZeroDivisionError("of ours")]), None, {})
    assert (await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")).ended == "record_error"
    assert await lease.ended() == Refused("record_error", "no completion: ZeroDivisionError")


@pytest.mark.parametrize("size", [700_000, 1_500_000])
async def test_a_long_line_of_a_stream_is_read_up_to_its_limit(tokenizer: HubTokenizer, size: int) -> None:
    """aiohttp's own reader of lines ends at 512 KiB, with a ValueError."""
    long = orjson.dumps({**EVENT, "content": "x", "prompt": "y" * size})
    async with Answering().running() as server:
        server.headers["Content-Type"] = "text/event-stream"
        server.body = b": a comment\r\n\ndata: %b\n\ndata: [DONE]" % long
        client = HttpClient(Endpoint(server.base_url, "m"))
        if size < MAX_LINE_BYTES:
            (event,) = await client.stream("/completion", {}, timeout_s=10)
            assert len(event["prompt"]) == size
        else:
            with pytest.raises(CompletionError, match=f"a line over {MAX_LINE_BYTES} bytes"):
                await client.stream("/completion", {}, timeout_s=10)
        await client.aclose()


async def test_a_first_completion_that_an_old_llamacpp_let_run_over_is_a_sample(tokenizer: HubTokenizer) -> None:
    """It drops the beginning of its context and samples on: with a long text a policy could earn another draw."""
    over = {**EVENT, "truncated": True, "stop_type": "limit"}
    async with Answering().running() as server:
        server.headers["Content-Type"] = "text/event-stream"
        client = HttpClient(Endpoint(server.base_url, "m"))
        completer = LlamaCppCompleter(LlamaCppDialect(), client, tokenizer, ONCE)
        server.body = b"data: %b\n\n" % orjson.dumps(over)
        made = CompletionRequest((), ids_of([1, 2]), (), SAMPLING, "r", "t", 0, 1)
        with pytest.raises(UnusableSample, match="context of the server is full") as over_full:
            await completer.sample(made)
        completion = over_full.value.completion
        assert (completion.tokens_T, completion.finish_reason) == ((5,), "length")
        assert completion.logprobs_T is None, "of another prompt than the record's"
        with pytest.raises(ContextLengthError, match="cut the prompt to 2 tokens"):
            await completer.sample(replace(made, prompt_ids=ids_of([1, 2, 3])))
        await client.aclose()
