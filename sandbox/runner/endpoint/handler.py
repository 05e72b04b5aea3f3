"""One HTTP request to the endpoint and its answer: paths, codings, streams, signs of life."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sandbox.errors import ClientGone
from sandbox.runner.endpoint import limits, mcp, messages
from sandbox.runner.endpoint.beats import beats
from sandbox.runner.endpoint.body import read_body
from sandbox.runner.endpoint.checks import MODEL, BadRequest, Body, Event, flag, openai_error, shown, strict_json

if TYPE_CHECKING:
    from sandbox.runner.endpoint.server import Server

_MAX_PATH_CHARS = 80
_IDLE_S = 300.0
_JSON, _EVENTS = "application/json", "text/event-stream"
_NOT_SERVED = {
    "/v1/responses": "responses are not given again: previous_response_id continues one",
    "/v1/embeddings": "there are no embeddings here",
}
_ALIVE = ("", "/v1", "/health", "/api/hello")  # the last one is Claude Code's


class Handler(BaseHTTPRequestHandler):
    """Serves one request of a connection, and ends it."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sandbox", ""
    timeout = _IDLE_S
    _started_type = ""  # the type of an answer whose head was sent before there was one

    def do_GET(self) -> None:
        """Lists the models, or tells of one: any name is taken. Clients also ask whether anybody is there."""
        tokens = self.server.endpoint.context_tokens
        name = unquote(self._path.removeprefix("/v1/models/"))
        if self._path == "/v1/models":
            self._send(200, limits.models(MODEL, tokens))
        elif name != self._path and len(name) <= _MAX_PATH_CHARS:
            self._send(200, limits.model(name, tokens))
        elif self._path in _ALIVE:
            self._send(200, {"status": "ok"})
        elif self._path == mcp.PATH:  # a stream of the server's own words; there are none
            self._not_allowed()
        else:
            self._not_found()

    do_HEAD = do_GET

    def do_OPTIONS(self) -> None:
        """Tells which methods there are."""
        self.close_connection = True
        self.send_response(204)
        self.send_header("Allow", "GET, HEAD, OPTIONS, POST")
        self.send_header("Connection", "close")
        self.end_headers()

    def do_POST(self) -> None:
        """Serves one completion, counts the tokens of a prompt, or answers a message of MCP."""
        endpoint = self.server.endpoint
        if self._path == mcp.PATH:
            self._serve_mcp()
            return
        counter = endpoint.counters.get(self._path)
        api = counter or endpoint.apis.get(self._path)
        if api is None:
            self._not_found()
            return
        try:
            body = self._body()
            if counter is not None:
                self._send(200, counter.count(endpoint.prompt_tokens(counter, body, self.connection)))
                return
            with beats(partial(self._beat, stream=body.get("stream") is True)):
                served = endpoint.serve(api, body, self.connection)
        except ClientGone:
            self.close_connection = True
            return
        except BadRequest as error:
            self._refuse(error, api.error(error))
            return
        if flag(served.body, "stream"):
            self._stream(api.events(served))
        else:
            self._send(200, api.answer(served), sampled=True)

    def do_DELETE(self) -> None:
        """There is nothing to delete."""
        if self._path == mcp.PATH:  # a session; there are none
            self._not_allowed()
        else:
            self._not_found()

    def _serve_mcp(self) -> None:
        endpoint, number = self.server.endpoint, None
        try:
            message = mcp.read_message(read_body(self.headers, self.rfile))
            number = message.number
            mcp.demand_version(self.headers.get("MCP-Protocol-Version"))
            if number is None:
                self._answer_nothing(202)
                return
            with beats(partial(self._beat, stream=False, sampled=False)):
                answer = endpoint.answer_mcp(message, self.connection)
        except ClientGone:
            self.close_connection = True
        except BadRequest as error:
            self._send(error.status, mcp.error_answer(mcp.unread(error)))
        except mcp.RpcError as error:
            self._send(error.status, mcp.error_answer(error, number))
        else:
            self._send(200, answer)

    def _not_allowed(self) -> None:
        self._answer_nothing(405, Allow="POST")

    def _answer_nothing(self, status: int, **headers: str) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no HTTP, or has a method that is not served: in the form of all errors, and not as a page."""
        # The request may not have been read so far.
        self.command, self.path = self.command or "", getattr(self, "path", "")
        self.request_version = self.protocol_version
        error = BadRequest(message or HTTPStatus(code).phrase, status=code)
        self._refuse(error, self._error(error))

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _not_found(self) -> None:
        """In the form of the API that has such paths."""
        paths = ", ".join((*self.server.endpoint.apis, mcp.PATH))
        reason = f"there is no {self.command} {shown(self._path)}: GET goes to /v1/models, POST to {paths}"
        for path, why in _NOT_SERVED.items():
            if self._path == path or self._path.startswith(f"{path}/"):
                reason = why
        error = BadRequest(reason, status=404)
        self._refuse(error, self._error(error))

    def _error(self, error: BadRequest) -> dict[str, Any]:
        return messages.error(error) if self._path.startswith("/v1/messages") else openai_error(error)

    def _body(self) -> Body:
        try:
            body = strict_json(read_body(self.headers, self.rfile))
        except (ValueError, RecursionError):
            raise BadRequest("the request is not JSON") from None
        if not isinstance(body, dict):
            raise BadRequest("the request is not a JSON object")
        return body

    def _refuse(self, error: BadRequest, answer: dict[str, Any]) -> None:
        request = f"{self.command} {self._path[:_MAX_PATH_CHARS]}"
        self.server.endpoint.notes.add_refusal(f"{request} got HTTP {error.status}: {error}")
        if not self._started_type:
            self._send(error.status, answer, refused=True)
        elif self._started_type == _EVENTS:
            self._stream(iter([Event(answer, "error")]))
        # Else it is too late to say why: the answer breaks off, which clients take for an error.

    def _send(self, status: int, value: dict[str, Any], *, sampled: bool = False, refused: bool = False) -> None:
        content = json.dumps(value).encode()
        if self._started_type:
            self._chunk(content)
            self._chunk(b"")
            return
        self._head(status, _JSON, sampled=sampled, refused=refused)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _stream(self, events: Iterator[Event]) -> None:
        write = self._chunk if self._started_type else self.wfile.write
        if not self._started_type:
            self._head(200, _EVENTS, sampled=True)
            self.end_headers()
        for event in events:
            name = f"event: {event.name}\n" if event.name else ""
            data = "[DONE]" if event.data is None else json.dumps(event.data)
            write(f"{name}data: {data}\n\n".encode())
        if self._started_type:
            self._chunk(b"")

    def _beat(self, *, stream: bool, sampled: bool = True) -> None:
        if self.request_version != self.protocol_version:
            return  # HTTP/1.0 has no chunks, and an answer without them would not be seen to break off
        if not self._started_type:
            self._started_type = _EVENTS if stream else _JSON
            self._head(200, self._started_type, sampled=sampled)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        self._chunk(b": waiting\n\n" if stream else b"\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def _head(self, status: int, kind: str, *, sampled: bool, refused: bool = False) -> None:
        """The first headers of an answer. Idle connections would hold places, and the rest of a refused request is
        not read: so each answer ends its connection."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if sampled:
            # Sampling parameters of a request are the run's: no answer may look as if they had been used.
            self.send_header("x-orchestrator-sampling", "run")
            for name, value in limits.RATES.items():
                self.send_header(name, value)
        self.send_header("Connection", "close")
        if refused:
            self.send_header("x-should-retry", "false")  # OpenAI's and Anthropic's clients would ask again

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
