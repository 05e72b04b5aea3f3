"""The endpoint for agent programs over HTTP: OpenAI's own client, and what no client sends."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from pydantic import BaseModel

from sandbox.errors import EpisodeEnd, LeaseEnded, RequestRefused
from sandbox.runner.endpoint.server import MAX_BODY_BYTES, ProgramEndpoint
from sandbox.types import Call, Completion, Message, Request, TokenLogprob

TALK: list[Any] = [{"role": "user", "content": "Hi"}]
HELLO = Completion("Hello, größer \ud800!", 10, 5, "length")
CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "add", '{"a": 2}'))
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}

Answers = Completion | BaseException


class Asked:
    """Gives the answers in turn, and keeps the requests and the ends."""

    def __init__(self, *answers: Answers) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []
        self.ends: list[EpisodeEnd] = []

    def __call__(self, request: Request, connection: socket.socket) -> Completion:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def serving(*answers: Answers) -> Iterator[tuple[ProgramEndpoint, Asked]]:
    asked = Asked(*answers)
    endpoint = ProgramEndpoint()
    with endpoint.serving(asked, asked.ends.append):
        yield endpoint, asked


@contextmanager
def openais(*answers: Answers) -> Iterator[tuple[openai.OpenAI, Asked]]:
    with serving(*answers) as (endpoint, asked):
        environment = endpoint.environment
        base_url, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        with openai.OpenAI(base_url=base_url, api_key=key, timeout=120) as client:
            yield client, asked


def post(endpoint: ProgramEndpoint, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


def test_chat_completions() -> None:
    sampled = (TokenLogprob("Hel", -0.5),)
    with openais(HELLO, HELLO, Completion("Hello", 1, 1, logprobs=sampled)) as (client, asked):
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("policy").id == "policy"
        raw = client.chat.completions.with_raw_response.create(
            model="any", messages=TALK, temperature=0.3, stop="END"
        )
        assert raw.headers["x-orchestrator-sampling"] == "run"
        said = raw.parse()
        assert said.choices[0].message.content == HELLO.text
        assert (said.choices[0].finish_reason, said.usage and said.usage.total_tokens) == ("length", 15)
        stream = client.chat.completions.create(model="any", messages=TALK, stream=True)
        pieces = [chunk.choices[0] for chunk in stream]
        assert "".join(piece.delta.content or "" for piece in pieces) == HELLO.text
        assert pieces[-1].finish_reason == "length"
        said = client.chat.completions.create(model="any", messages=TALK, logprobs=True)
        assert said.choices[0].logprobs
        assert said.choices[0].logprobs.content
        assert [(one.token, one.logprob) for one in said.choices[0].logprobs.content] == [("Hel", -0.5)]
    assert [request.stop for request in asked.requests] == [("END",), (), ()]
    assert asked.requests[0].messages == (Message("user", "Hi"),)


def test_chat_completions_with_tools() -> None:
    with openais(Completion("", 1, 1, calls=CALLS), Completion("3", 1, 1)) as (client, asked):
        with client.chat.completions.stream(
            model="any", messages=TALK, tools=[ADD], stream_options={"include_usage": True}
        ) as stream:
            for _ in stream:
                pass
            said = stream.get_final_completion()
        assert said.choices[0].finish_reason == "tool_calls"
        message = said.choices[0].message
        assert message.tool_calls
        assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == [
            (one.id, one.name, one.arguments) for one in CALLS
        ]
        results: list[Any] = [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in CALLS]
        talk = [*TALK, message.model_dump(), *results]
        client.chat.completions.create(model="any", messages=talk, tools=[ADD])
    assert asked.requests[1].messages == (
        *(Message("user", "Hi"), Message("assistant", "", CALLS)),
        *(Message("tool", "3", call_id=one.id) for one in CALLS),
    )
    assert asked.requests[1].tools == (ADD,)


def test_who_wants_one_call_gets_the_first() -> None:
    with openais(*[Completion("", 1, 1, calls=CALLS)] * 2) as (client, _):
        said = client.chat.completions.create(
            model="any", messages=TALK, tools=[ADD], parallel_tool_calls=False
        ).choices[0]
        assert [one.id for one in said.message.tool_calls or ()] == ["c1"]
        told = client.responses.create(model="any", input="Hi", tools=[FLAT], parallel_tool_calls=False)
        assert [item.type for item in told.output] == ["function_call"]


class Sum(BaseModel):
    total: int


def test_structured_answers() -> None:
    answer = Completion('{"total": 3}', 1, 1)
    with openais(answer, answer, answer) as (client, asked):
        said = client.chat.completions.parse(model="any", messages=TALK, response_format=Sum)
        assert said.choices[0].message.parsed == Sum(total=3)
        told = client.responses.parse(model="any", input="Hi", text_format=Sum)
        assert told.output_parsed == Sum(total=3)
        client.chat.completions.create(model="any", messages=TALK, response_format={"type": "json_object"})
    first, second, third = (request.response_format for request in asked.requests)
    assert first == second
    assert first
    assert first["json_schema"]["schema"]["properties"]["total"]["type"] == "integer"
    assert third == {"type": "json_object"}


def test_completions() -> None:
    with openais(HELLO, HELLO) as (client, asked):
        assert client.completions.create(model="any", prompt="Hi").choices[0].text == HELLO.text
        stream = client.completions.create(model="any", prompt="Hi", stream=True)
        assert "".join(piece.choices[0].text for piece in stream) == HELLO.text
    assert asked.requests == [Request((Message("user", "Hi"),))] * 2


def test_responses() -> None:
    with openais(HELLO, Completion("I add.", 1, 1, calls=CALLS), Completion("3", 1, 1)) as (client, asked):
        told = client.responses.create(model="any", input="Hi", instructions="Be brief.")
        assert (told.output_text, told.status) == (HELLO.text, "incomplete")
        assert told.incomplete_details
        assert told.incomplete_details.reason == "max_output_tokens"
        assert told.usage
        assert told.usage.total_tokens == 15
        with client.responses.stream(
            model="any", input="Add.", previous_response_id=told.id, tools=[FLAT]
        ) as stream:
            kinds = [event.type for event in stream]
            told = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert told.output_text == "I add."
        calls = [item for item in told.output if item.type == "function_call"]
        assert [(one.call_id, one.name, one.arguments) for one in calls] == [
            (one.id, one.name, one.arguments) for one in CALLS
        ]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "3"} for one in calls
        ]
        items: list[Any] = [*TALK, *(item.model_dump() for item in told.output), *results]
        client.responses.create(model="any", input=items, tools=[FLAT])
    assert [message.content for message in asked.requests[1].messages] == ["Hi", HELLO.text, "Add."]
    assert asked.requests[2].messages == (
        *(Message("user", "Hi"), Message("assistant", "I add.", CALLS)),
        *(Message("tool", "3", call_id=one.id) for one in CALLS),
    )


Send = Callable[[openai.OpenAI], object]
SENDERS = [
    lambda client: client.chat.completions.create(model="any", messages=TALK),
    lambda client: client.chat.completions.create(model="any", messages=TALK, stream=True),
    lambda client: client.completions.create(model="any", prompt="Hi"),
    lambda client: client.responses.create(model="any", input="Hi"),
    lambda client: client.responses.create(model="any", input="Hi", stream=True),
]


@pytest.mark.parametrize("send", SENDERS)
def test_what_is_refused_and_what_is_over(send: Send) -> None:
    too_long = "This model's maximum context length is 4 tokens."
    refusals = (
        RequestRefused(too_long, "messages", too_long=True),
        RequestRefused("there is no guided decoding", "response_format"),
    )
    with openais(*refusals, LeaseEnded("budget")) as (client, asked):
        with pytest.raises(openai.BadRequestError, match=too_long) as refused:
            send(client)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="no guided decoding") as refused:
            send(client)
        assert refused.value.code is None
        assert "format" in str(refused.value.param)
        # What ends the rollout is told once, and asked for no more.
        for _ in range(2):
            with pytest.raises(openai.RateLimitError, match="the rollout is over"):
                send(client)
    assert len(asked.requests) == 3
    assert [str(end) for end in asked.ends] == ["budget"]


def test_a_bad_request_is_not_sampled() -> None:
    with openais() as (client, asked):
        with pytest.raises(openai.BadRequestError, match="send several requests") as refused:
            client.chat.completions.create(model="any", messages=TALK, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError, match="previous_response_id continues one"):
            client.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError, match="previous_response_id continues one"):
            client.responses.delete("resp_1")
        with pytest.raises(openai.NotFoundError, match="no embeddings"):
            client.embeddings.create(model="any", input="x")
        with pytest.raises(openai.NotFoundError, match="POST to /v1/chat/completions"):
            client.files.list()
    assert asked.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_is_no_request(path: str) -> None:
    bodies = [
        *(b"", b"{", b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'"\\ud800"', b"null"),
        *(b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"n": ' + b"1" * 5000 + b"}"),
        *(b'{"messages": ' + nest + b', "input": ' + nest + b', "prompt": ' + nest + b"}" for nest in NESTS),
        b'{"messages": [' + b"{}," * 1_000_000 + b'{}], "input": [' + b"1," * 1000 + b"1]}",
        b'{"messages": "' + b"x" * 100 + b'", "\\ud800": 1}',
    ]
    with serving() as (endpoint, asked):
        for body in bodies:
            status, told = post(endpoint, path, body)
            assert status == 400, body[:50]
            assert told["error"]["type"] == "invalid_request_error"
            assert len(told["error"]["message"]) < 500
        status, told = post(endpoint, path, b"", **{"Content-Length": str(MAX_BODY_BYTES + 1)})
        assert status == 413
        for length in ("-1", "x", "²", "9" * 100):
            assert post(endpoint, path, b"", **{"Content-Length": length})[0] in (411, 413)
    assert asked.requests == []


NESTS = [b"[" * 900 + b"]" * 900, b'[{"content":' * 400 + b"1" + b"}]" * 400]


def test_errors_below_messages_are_anthropics() -> None:
    with serving() as (endpoint, _):
        for path, found in (("/v1/messages/batches", 404), ("/v1/messages/count_tokens", 400)):
            status, told = post(endpoint, path, b"{}")
            kind = "not_found_error" if found == 404 else "invalid_request_error"
            assert (status, told["type"], told["error"]["type"]) == (found, "error", kind)
        status, told = post(endpoint, "/v1/edits", b"{}")
        assert (status, told["error"]["code"]) == (404, None)


@pytest.mark.parametrize(
    "request_line",
    [
        *(f"{method} /v1/chat/completions HTTP/1.1" for method in ("PUT", "PATCH", "TRACE", "NONE")),
        *("\0 odd", "POST /v1/messages HTTP/9.1", "GET /" + "a" * 70_000 + " HTTP/1.1"),
    ],
)
def test_what_is_no_request_of_any_api_gets_an_error_like_all_others(request_line: str) -> None:
    with serving() as (endpoint, _):
        address = urlsplit(endpoint.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(f"{request_line}\r\n\r\n".encode())
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            told = json.load(answer)
    assert answer.status >= 400
    assert told["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


def test_connections_have_a_limit_and_others_wait_for_a_place() -> None:
    body = json.dumps({"messages": TALK}).encode()
    with serving(HELLO) as (endpoint, _):
        address = urlsplit(endpoint.url)
        held = [socket.create_connection((address.hostname, address.port)) for _ in range(16)]
        for connection in held:  # each is taken by a thread, which waits for the rest
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        waiting = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
        waiting.request("POST", "/v1/chat/completions", body)
        for connection in held:
            connection.sendall(b"\r\n")
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert waiting.getresponse().status == 200  # a connection that was answered holds no place


def test_an_endpoint_whose_places_are_all_held_can_be_ended() -> None:
    with serving() as (endpoint, _):
        address = urlsplit(endpoint.url)
        held = [socket.create_connection((address.hostname, address.port)) for _ in range(20)]
        assert len(held) == 20


async def test_a_program_may_ask_for_many_completions_at_a_time() -> None:
    def ask(request: Request, connection: socket.socket) -> Completion:
        threading.Event().wait(0.05)
        return HELLO

    endpoint = ProgramEndpoint()
    with endpoint.serving(ask, lambda end: None):
        environment = endpoint.environment
        async with openai.AsyncOpenAI(
            base_url=environment["OPENAI_BASE_URL"], api_key="x", timeout=120, max_retries=0
        ) as client:
            said = [client.chat.completions.create(model="any", messages=TALK) for _ in range(60)]
            assert len(await asyncio.gather(*said)) == 60


def test_one_completion_is_asked_for_at_a_time() -> None:
    inside, most = 0, 0

    def ask(request: Request, connection: socket.socket) -> Completion:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.02)
        inside -= 1
        return HELLO

    body = json.dumps({"input": "Hi"}).encode()
    numbers: list[str] = []
    endpoint = ProgramEndpoint()
    with endpoint.serving(ask, lambda end: None):
        threads = [
            threading.Thread(target=lambda: numbers.append(post(endpoint, "/v1/responses", body)[1]["id"]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (most, sorted(numbers)) == (1, [f"resp_{number}" for number in range(1, 9)])
