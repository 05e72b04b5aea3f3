"""The endpoint's `/mcp`: one JSON-RPC message per request, as the Model Context Protocol has it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from sandbox.errors import EpisodeEnd, LeaseEnded, ToolFailure
from sandbox.runner.endpoint import beats
from sandbox.runner.endpoint.body import MAX_BODY_BYTES
from sandbox.runner.endpoint.mcp import VERSIONS, input_schema
from sandbox.runner.endpoint.server import ProgramEndpoint
from sandbox.types import Completion, ToolSpec

PRICE = ToolSpec(
    "price",
    "Looks up a price.",
    {
        "article": {"type": "string", "description": "Its name.", "enum": ["pen", "ink"]},
        "options": {"type": "any", "description": "Anything.", "nullable": True},
    },
    "number",
)
CallTool = Callable[[str, str], str]


@contextmanager
def serving(
    call_tool: CallTool = lambda name, arguments: "1.5", ended: Callable[[EpisodeEnd], None] = lambda end: None
) -> Iterator[ProgramEndpoint]:
    endpoint = ProgramEndpoint()
    with endpoint.serving(
        lambda request, connection: Completion("", 1, 1),
        ended,
        tools=[PRICE],
        call_tool=lambda name, arguments, connection: call_tool(name, arguments),
    ):
        yield endpoint


def send(endpoint: ProgramEndpoint, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
    try:
        connection.request(method, "/mcp", content, {n.replace("_", "-"): v for n, v in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.strip() else None
    finally:
        connection.close()


def ask(endpoint: ProgramEndpoint, method: str, params: Any = None, **headers: str) -> Any:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, **({} if params is None else {"params": params})}
    status, answer = send(endpoint, message, **headers)
    assert status == 200
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", 7)
    return answer.get("result", answer.get("error"))


@pytest.mark.parametrize(("asked", "given"), [*((one, one) for one in VERSIONS), ("1999-01-01", VERSIONS[0])])
def test_a_client_gets_the_version_that_it_asks_for_or_the_newest(asked: str, given: str) -> None:
    with serving() as endpoint:
        result = ask(endpoint, "initialize", {"protocolVersion": asked, "capabilities": {}})
    assert result["protocolVersion"] == given
    assert result["capabilities"] == {"tools": {"listChanged": False}}


def test_the_tools_are_listed_with_a_json_schema_of_their_arguments() -> None:
    with serving() as endpoint:
        (tool,) = ask(endpoint, "tools/list")["tools"]
        assert ask(endpoint, "ping") == {}
        assert ask(endpoint, "tools/list", {"cursor": "x"})["code"] == -32602
    assert tool["name"] == "price"
    assert tool["inputSchema"] == {
        "type": "object",
        "properties": {
            "article": {"type": "string", "description": "Its name.", "enum": ["pen", "ink"]},
            "options": {"description": "Anything."},
        },
        "required": ["article"],
    }
    assert input_schema({}) == {"type": "object", "properties": {}}


def test_a_call_gets_text_and_a_tools_error_is_a_result() -> None:
    calls = []

    def call(name: str, arguments: str) -> str:
        calls.append((name, json.loads(arguments)))
        if "bad" in arguments:
            raise ToolFailure("no article bad")
        return "größer"

    with serving(call) as endpoint:
        good = ask(endpoint, "tools/call", {"name": "price", "arguments": {"article": "pen"}})
        bad = ask(endpoint, "tools/call", {"name": "price", "arguments": {"article": "bad"}})
        none = ask(endpoint, "tools/call", {"name": "price"})
    assert good == {"content": [{"type": "text", "text": "größer"}], "isError": False}
    assert bad == {"content": [{"type": "text", "text": "no article bad"}], "isError": True}
    assert none["isError"] is False
    assert calls == [("price", {"article": "pen"}), ("price", {"article": "bad"}), ("price", {})]


@pytest.mark.parametrize(
    ("method", "params", "code", "says"),
    [
        ("tools/call", {"name": "none"}, -32602, "there is no tool 'none'; there are: price"),
        ("tools/call", {"name": ["price"]}, -32602, "there is no tool"),
        ("tools/call", {"name": "price", "arguments": [1]}, -32602, "arguments must be an object"),
        ("tools/call", {"name": "price", "arguments": {"a": "x" * 300_000}}, -32602, "more than 262144 bytes"),
        ("tools/call", {"name": "price", "arguments": {"a": json.loads("[" * 90 + "]" * 90)}}, -32602, "deep"),
        ("resources/list", None, -32601, "there is no method 'resources/list'"),
        ("server/discover", None, -32601, "there is no method"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(method: str, params: Any, code: int, says: str) -> None:
    def call(name: str, arguments: str) -> str:
        raise AssertionError("nothing is called")

    with serving(call) as endpoint:
        error = ask(endpoint, method, params)
    assert error["code"] == code
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"\xff\xfe", 400, -32700),
        (b"[" * 10_000 + b"]" * 10_000, 400, -32700),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, -32700),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"n": NaN}}', 400, -32700),
        ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}], 400, -32600),
        ("ping", 400, -32600),
        ({"id": 1, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1}, 400, -32600),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": True, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": {}, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": "x" * 1000, "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, 400, -32600),
    ],
)
def test_what_is_no_message_is_a_named_error(body: Any, status: int, code: int) -> None:
    with serving() as endpoint:
        got, answer = send(endpoint, body)
    assert got == status
    assert (answer["id"], answer["error"]["code"]) == (None, code)
    assert answer["error"]["message"]


def test_a_message_that_is_too_long_is_not_read() -> None:
    with serving() as endpoint:
        connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
        connection.putrequest("POST", "/mcp")
        connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, -32600)
        connection.close()


def test_batches_are_refused_by_name() -> None:
    with serving() as endpoint:
        _, answer = send(endpoint, [])
    assert answer["error"]["message"] == "batches are not taken: send one message per request"


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}},
        {"jsonrpc": "2.0", "id": 3, "result": {}},
        {"jsonrpc": "2.0", "id": 3, "error": {"code": 1, "message": "no"}},
    ],
)
def test_notifications_and_responses_are_accepted_without_an_answer(message: dict[str, Any]) -> None:
    with serving() as endpoint:
        assert send(endpoint, message) == (202, None)


def test_there_are_no_streams_and_no_sessions() -> None:
    with serving() as endpoint:
        assert send(endpoint, b"", "GET")[0] == 405
        assert send(endpoint, b"", "DELETE")[0] == 405


def test_another_version_of_the_protocol_is_refused_with_those_that_are_spoken() -> None:
    with serving() as endpoint:
        for version in VERSIONS:
            assert ask(endpoint, "ping", MCP_Protocol_Version=version) == {}
        message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        status, answer = send(endpoint, message, MCP_Protocol_Version="2099-01-01")
    assert (status, answer["id"]) == (400, 1)
    assert answer["error"]["data"]["supported"] == list(VERSIONS)


def test_the_end_of_the_rollout_is_told_and_nothing_is_called_after_it() -> None:
    calls: list[str] = []
    ends: list[EpisodeEnd] = []

    def call(name: str, arguments: str) -> str:
        calls.append(name)
        raise LeaseEnded("budget")

    with serving(call, ends.append) as endpoint:
        answers = [ask(endpoint, "tools/call", {"name": "price"}) for _ in range(3)]
    assert [answer["message"] for answer in answers] == ["the rollout is over"] * 3
    assert (calls, len(ends)) == (["price"], 1)


def test_calls_are_served_side_by_side() -> None:
    together = threading.Barrier(5)

    def call(name: str, arguments: str) -> str:
        together.wait(timeout=60)
        return "1"

    with serving(call) as endpoint, ThreadPoolExecutor(5) as threads:
        results = list(threads.map(lambda _: ask(endpoint, "tools/call", {"name": "price"}), range(5)))
    assert [one["isError"] for one in results] == [False] * 5


def test_a_client_that_waits_long_hears_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    heard = threading.Event()

    def call(name: str, arguments: str) -> str:
        assert heard.wait(60)
        return "1"

    with serving(call) as endpoint:
        address = urlsplit(endpoint.url)
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "price"}}
        ).encode()
        head = b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(head + body)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.read(1) == b"\n"
            assert answer.headers["x-orchestrator-sampling"] is None
            heard.set()
            assert json.loads(answer.read())["result"]["isError"] is False


def test_the_program_learns_the_address() -> None:
    endpoint = ProgramEndpoint()
    with endpoint.serving(lambda request, connection: Completion("", 1, 1), lambda end: None):
        assert endpoint.environment["ORCHESTRATOR_MCP_URL"] == f"{endpoint.url}/mcp"
        assert ask(endpoint, "tools/list") == {"tools": []}
