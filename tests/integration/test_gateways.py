"""What gateways put around an answer: compression, statuses of their own, words for an end, keys given twice."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from aiohttp import web

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.finish import end_of
from orchestrator.completion.http import MAX_ERROR_BYTES, HttpClient
from orchestrator.completion.retry import Retryable, RetryPolicy
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError
from tests.integration.test_network import serving
from tests.unit.test_refused_parameters import request

LONG = b'{"error": "This model\'s maximum context length is 10 tokens."}'


def packed(status: int, body: bytes, encoding: str = "gzip") -> Callable[[web.Request], web.StreamResponse]:
    data = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    return lambda request: web.Response(status=status, body=data, headers=headers)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_error_is_what_its_status_and_words_say(encoding: str) -> None:
    for status, body, expected, words in (
        (400, LONG, ContextLengthError, "maximum context length"),
        (503, b"starting", Retryable, "HTTP 503: starting"),
        (400, b"odd", Refusal, "HTTP 400: odd"),
        (503, b"very long " * 5_000_000, Retryable, "HTTP 503: very long"),
    ):
        async with serving(packed(status, body, encoding)) as (address, _):
            client = HttpClient(Endpoint(address, "m"))
            with pytest.raises(expected, match=words) as error:
                await client.post("/v1/x", {}, timeout_s=10)
            assert len(str(error.value)) < MAX_ERROR_BYTES
            await client.aclose()


async def test_a_compressed_answer_is_refused_and_a_plain_one_of_any_name_taken() -> None:
    async with serving(packed(200, b"{}")) as (address, _):
        client = HttpClient(Endpoint(address, "m"))
        with pytest.raises(CompletionError, match="a compressed answer"):
            await client.post("/v1/x", {}, timeout_s=10)
        await client.aclose()
    for name in ("identity", "Identity", ""):
        plain = web.json_response({"a": 1}, headers={"Content-Encoding": name})
        async with serving(lambda request, plain=plain: plain) as (address, _):  # type: ignore[misc]
            client = HttpClient(Endpoint(address, "m"))
            assert await client.post("/v1/x", {}, timeout_s=10) == {"a": 1}
            await client.aclose()


@pytest.mark.parametrize("status", [300, 304, 305])
async def test_a_status_without_a_new_address_names_none(status: int) -> None:
    async with serving(lambda request: web.Response(status=status)) as (address, _):
        client = HttpClient(Endpoint(address, "m"))
        with pytest.raises(Refusal, match=f"HTTP {status}") as error:
            await client.post("/v1/x", {}, timeout_s=10)
        assert "redirects" not in str(error.value)
        assert not error.value.of_text
        await client.aclose()


async def test_a_key_that_is_given_twice_is_refused_or_sent_once() -> None:
    async with serving() as (address, requests):
        client = HttpClient(Endpoint(address.replace("//", "//me:geheim@"), "m", "key"))
        with pytest.raises(AuthenticationError, match="leave one of them out") as error:
            await client.post("/v1/x", {}, timeout_s=10)
        assert "geheim" not in str(error.value)
        client = HttpClient(Endpoint(address, "m", "key", headers={"authorization": "Basic eA=="}))
        await client.post("/v1/x", {}, timeout_s=10)
        assert requests[-1].headers.getall("Authorization") == ["Basic eA=="]
        await client.aclose()
        with pytest.raises(Retryable, match="connections were closed"):
            await client.post("/v1/x", {}, timeout_s=10)


async def test_a_balancer_s_cookie_is_not_kept() -> None:
    def says(request: web.Request) -> web.StreamResponse:
        answer = web.json_response({"cookie": request.headers.get("Cookie")})
        answer.set_cookie("server", "1")
        return answer

    async with serving(says) as (address, _):
        client = HttpClient(Endpoint(address.replace("127.0.0.1", "localhost"), "m"))
        assert [await client.post("/v1/x", {}, timeout_s=10) for _ in range(2)] == [{"cookie": None}] * 2
        await client.aclose()


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("internal_error interrupted PREEMPTED serviceUnavailable overloaded", "broken_off"),
        ("timed_out DEADLINE_EXCEEDED", "out_of_time"),
        ("policy_violation guardrails contentPolicy", "content_filter"),
        ("MAX_TOKENS_REACHED length_limit overflow", "length"),
        ("eos_token_id function", "stop"),
    ],
)
def test_words_of_more_services_are_known(words: str, end: str) -> None:
    """Unknown, an answer that a server broke off would count as the policy's last word."""
    assert {end_of(word) for word in words.split()} == {end}


async def test_an_answer_that_was_interrupted_is_no_answer() -> None:
    def says(request: web.Request) -> web.StreamResponse:
        message = {"role": "assistant", "content": "The answer is"}
        return web.json_response({"choices": [{"finish_reason": "deadline_exceeded", "message": message}]})

    async with serving(says) as (address, _):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), RetryPolicy(attempts=1, pauses=0))
        with pytest.raises(CompletionError, match="deadline_exceeded"):
            await completer.sample(request())
        await completer.aclose()
