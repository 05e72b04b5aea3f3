"""HTTP as clients of agent programs speak it: chunks, compressed bodies, questions beforehand, long waits."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from sandbox.errors import RequestRefused
from sandbox.runner.endpoint import beats
from sandbox.runner.endpoint.body import MAX_BODY_BYTES
from sandbox.runner.endpoint.limits import PATIENCE
from sandbox.runner.endpoint.server import ProgramEndpoint
from sandbox.types import Completion, Request

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "größer"}]}).encode()
HELLO = Completion("Hello", 10, 5)


Answers = Completion | RequestRefused


class Asked:
    """Gives the answers in turn, after some beats if it is `slow`; and keeps the requests."""

    def __init__(self, *answers: Answers, slow: bool) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []
        self.slow = slow

    def __call__(self, request: Request, connection: socket.socket) -> Completion:
        self.requests.append(request)
        if self.slow:
            threading.Event().wait(50 * beats.BEAT_S)
        answer = self.answers.pop(0) if self.answers else HELLO
        if isinstance(answer, RequestRefused):
            raise answer
        return answer


@contextmanager
def serving(*answers: Answers, slow: bool = False) -> Iterator[tuple[ProgramEndpoint, Asked]]:
    asked = Asked(*answers, slow=slow)
    endpoint = ProgramEndpoint()
    with endpoint.serving(asked, lambda end: None):
        yield endpoint, asked


@contextmanager
def connected(endpoint: ProgramEndpoint) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def send(endpoint: ProgramEndpoint, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    with connected(endpoint) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()


def raw(endpoint: ProgramEndpoint, request: bytes) -> http.client.HTTPResponse:
    address = urlsplit(endpoint.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.read()
        return answer


def deflated(content: bytes) -> bytes:
    """Without its header, as some send it."""
    writer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return writer.compress(content) + writer.flush()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("identity", BODY),
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", deflated(BODY)),
        ("gzip, deflate", zlib.compress(gzip.compress(BODY, mtime=0))),
    ],
)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_in_any_coding_is_read(coding: str, body: bytes, in_chunks: bool) -> None:
    with serving() as (endpoint, asked):
        pieces = (body[at : at + 7] for at in range(0, len(body), 7))
        status, told = send(endpoint, "POST", CHAT, pieces if in_chunks else body, Content_Encoding=coding)
        assert (status, json.loads(told)["choices"][0]["message"]["content"]) == (200, "Hello")
    assert asked.requests[0].messages[0].content == "größer"


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (CHUNKED + b"x\r\n", 400),
        (CHUNKED + b"-1\r\n", 400),
        (CHUNKED + b"0x5\r\n", 400),
        (CHUNKED + b"\r\n", 400),
        (CHUNKED + b"2\r\n{}more\r\n0\r\n\r\n", 400),
        (CHUNKED + b"2;name=value\r\n{}\r\n0\r\nTrailer: x\r\n\r\n", 400),  # read, and has no messages
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 200, 400),
        (CHUNKED + b"f" * 10_000, 400),
        (CHUNKED + b"fffffff\r\n", 413),
        (CHUNKED + b"400000\r\n" + b" " * 0x400000 + b"\r\n1\r\n", 413),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (HEAD + b"Content-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}", 415),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}", 400),  # read, and has no messages
    ],
    ids=count(),
)
def test_what_is_no_body_is_refused(request_bytes: bytes, status: int) -> None:
    with serving() as (endpoint, asked):
        assert raw(endpoint, request_bytes).status == status
    assert asked.requests == []


def test_a_small_body_cannot_become_a_large_one() -> None:
    bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    with serving() as (endpoint, _):
        assert send(endpoint, "POST", CHAT, bomb, Content_Encoding="gzip")[0] == 413
        twice = gzip.compress(gzip.compress(b" " * (64 << 20)))
        assert send(endpoint, "POST", CHAT, twice, Content_Encoding="gzip, gzip")[0] == 413


def test_a_client_that_waits_for_the_word_to_send_gets_it() -> None:
    with serving() as (endpoint, _):
        address = urlsplit(endpoint.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(BODY)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_whether_anybody_is_there() -> None:
    with serving() as (endpoint, _):
        for path in ("/", "/v1", "/health", "/v1/models", "/v1/models/gpt-9"):
            assert send(endpoint, "HEAD", path) == (200, b"")
            assert json.loads(send(endpoint, "GET", path)[1])
        assert send(endpoint, "HEAD", "/v1/files") == (404, b"")
        assert send(endpoint, "OPTIONS", CHAT) == (204, b"")
    assert endpoint.notes.take().refusals == (
        "HEAD /v1/files got HTTP 404: there is no HEAD '/v1/files': GET goes to /v1/models, POST to "
        "/v1/chat/completions, /v1/completions, /v1/messages, /v1/responses, /mcp",
    )


def test_models_have_any_name_and_tell_their_length() -> None:
    with serving() as (endpoint, _):
        endpoint.context_tokens = 4096
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as client:
            [listed] = client.models.list()
            assert (listed.id, listed.to_dict()["max_model_len"]) == ("policy", 4096)
            assert client.models.retrieve("meta-llama/Llama-9").id == "meta-llama/Llama-9"
        with anthropic.Anthropic(base_url=endpoint.url, api_key="x") as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            told = client.models.retrieve("claude-9")
            assert (told.id, told.type, told.display_name, told.max_input_tokens) == (
                "claude-9",
                "model",
                "claude-9",
                4096,
            )


def test_the_tokens_of_a_prompt_are_counted_and_nothing_is_sampled() -> None:
    refused = RequestRefused("this run has no tokenizer")
    with serving(Completion("", 7, 0), Completion("", 8, 0), refused) as (endpoint, asked):
        with anthropic.Anthropic(base_url=endpoint.url, api_key="x") as client:
            assert client.messages.count_tokens(model="any", messages=TALK, system="Be brief.").input_tokens == 7
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as client:
            assert client.responses.input_tokens.count(model="any", input="Hi").input_tokens == 8
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                client.responses.input_tokens.count(model="any", input="Hi")
    assert [request.count_only for request in asked.requests] == [True] * 3
    assert [message.content for message in asked.requests[0].messages] == ["Be brief.", "Hi"]


def test_clients_are_told_generous_limits() -> None:
    with serving() as (endpoint, _):
        assert PATIENCE.items() <= endpoint.environment.items()
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as client:
            answer = client.chat.completions.with_raw_response.create(model="any", messages=TALK)
    assert answer.headers["x-ratelimit-remaining-requests"] == answer.headers["x-ratelimit-limit-requests"]


@pytest.fixture
def beats_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)


@pytest.mark.usefixtures("beats_often")
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_waits_hears_signs_of_life(path: str, stream: bool) -> None:
    body = {"stream": stream, "max_tokens": 9}
    asks = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    body |= asks.get(path, {"messages": [{"role": "user", "content": "Hi"}]})
    with serving(slow=True) as (endpoint, _), connected(endpoint) as connection:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        assert (answer.status, answer.headers["x-orchestrator-sampling"]) == (200, "run")
        told = answer.read()
    if stream:
        assert told.startswith(b": waiting\n\n: waiting\n\n")
        assert b"Hello" in told
    else:
        assert told.startswith(b"\n\n")
        assert "Hello" in json.dumps(json.loads(told))


TALK: Any = [{"role": "user", "content": "Hi"}]


@pytest.mark.usefixtures("beats_often")
def test_clients_read_what_comes_after_signs_of_life() -> None:
    with serving(slow=True) as (endpoint, _):
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as client:
            said = client.chat.completions.create(model="any", messages=TALK)
            assert said.choices[0].message.content == "Hello"
            with client.chat.completions.stream(model="any", messages=TALK) as stream:
                assert stream.get_final_completion().choices[0].message.content == "Hello"
            with client.responses.stream(model="any", input="Hi") as responses:
                assert responses.get_final_response().output_text == "Hello"
        with anthropic.Anthropic(base_url=endpoint.url, api_key="x", max_retries=0) as other:
            assert other.messages.create(model="any", max_tokens=9, messages=TALK).stop_reason == "end_turn"
            with other.messages.stream(model="any", max_tokens=9, messages=TALK) as told:
                assert told.get_final_text() == "Hello"


@pytest.mark.usefixtures("beats_often")
def test_a_refusal_after_signs_of_life_is_an_error_and_no_answer() -> None:
    refusals = [RequestRefused("too long", too_long=True)] * 3
    with serving(*refusals, slow=True) as (endpoint, _):
        with connected(endpoint) as connection:
            connection.request("POST", CHAT, BODY)
            answer = connection.getresponse()
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.chat.completions.create(model="any", messages=TALK, stream=True)
            with pytest.raises(openai.APIError, match="too long"):
                list(chunks)
        with anthropic.Anthropic(base_url=endpoint.url, api_key="x", max_retries=0) as other:
            events = other.messages.create(model="any", max_tokens=9, messages=TALK, stream=True)
            with pytest.raises(anthropic.APIError, match="too long"):
                list(events)
