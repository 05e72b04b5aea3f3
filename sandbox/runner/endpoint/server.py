"""The HTTP server of the endpoint: connections, sizes, routes."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Protocol

from sandbox.errors import ClientGone, EpisodeEnd, RequestRefused
from sandbox.runner.endpoint import chat, completions, messages, tools
from sandbox.runner.endpoint.checks import (
    MODEL,
    TOO_LONG,
    BadRequest,
    Body,
    Event,
    Served,
    flag,
    openai_error,
    shown,
    strict_json,
)
from sandbox.runner.endpoint.responses import Responses
from sandbox.runner.hang_up import hung_up
from sandbox.types import Completion, Request

MAX_BODY_BYTES = 4 << 20
MAX_REFUSED, _MAX_PATH_CHARS = 3, 80
_MAX_CONNECTIONS, _MAX_WAITING = 40, 256
_IDLE_S, _LOOK_S = 300.0, 0.1
_NOT_SERVED = {
    "/v1/messages/count_tokens": "tokens are not counted here: the usage of each answer says how many it had",
    "/v1/responses": "responses are not given again: previous_response_id continues one",
    "/v1/embeddings": "there are no embeddings here",
}

# Gets a completion for the request that came over this connection. Raises RequestRefused, ClientGone, EpisodeEnd.
Ask = Callable[[Request, socket.socket], Completion]


class Api(Protocol):
    """One API: how it reads a request (raising BadRequest), and how it writes what became of it."""

    def request(self, body: Body, /) -> Request: ...
    def answer(self, served: Served, /) -> dict[str, Any]: ...
    def events(self, served: Served, /) -> Iterator[Event]: ...
    def error(self, error: BadRequest, /) -> dict[str, Any]: ...


class ProgramEndpoint:
    """It has its address from the start, and answers while it is `serving`."""

    def __init__(self) -> None:
        self.apis: dict[str, Api] = {
            "/v1/chat/completions": chat,
            "/v1/completions": completions,
            "/v1/messages": messages,
            "/v1/responses": Responses(),
        }
        self._ask: Ask
        self._ended: Callable[[EpisodeEnd], None]
        self._places: threading.Semaphore
        self._lock = threading.Lock()  # of the next two
        self._over = False
        self._served = 0
        self.refused: list[str] = []  # the first different requests that were not served, and why, for people
        self._server = _Server(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """By which the clients of OpenAI and Anthropic find it."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "sandbox",
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "sandbox",
            "ANTHROPIC_MODEL": MODEL,
        }

    @contextmanager
    def serving(self, ask: Ask, ended: Callable[[EpisodeEnd], None], *, parallel: int = 1) -> Iterator[None]:
        """Serves until the block is left, once. `ask` is called by so many threads at a time. The first EpisodeEnd
        that it raises goes to `ended`."""
        self._ask, self._ended = ask, ended
        self._places = threading.Semaphore(parallel)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="endpoint", daemon=True).start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()

    def note_refusal(self, request: str, error: BadRequest) -> None:
        """Keeps the first MAX_REFUSED, each once: programs try again."""
        told = f"{request} got HTTP {error.status}: {error}"
        if len(self.refused) < MAX_REFUSED and told not in self.refused:
            self.refused.append(told)

    def serve(self, api: Api, body: Body, connection: socket.socket) -> Served:
        """Gets a completion. Raises BadRequest, ClientGone."""
        request = api.request(body)
        with self._places:
            if self._over:
                raise BadRequest("the rollout is over", status=429)
            if hung_up(connection):  # while it waited for its place
                raise ClientGone
            try:
                completion = self._ask(request, connection)
            except EpisodeEnd as end:
                self._end(end)
                raise BadRequest("the rollout is over", status=429) from end
            except RequestRefused as refused:
                code = TOO_LONG if refused.too_long else None
                raise BadRequest(str(refused), refused.param or None, code=code) from refused
        with self._lock:
            self._served += 1
            return Served(self._served, body, request, tools.given(completion, body))

    def _end(self, end: EpisodeEnd) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._ended(end)


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    """One thread per connection, at most _MAX_CONNECTIONS; more wait for their turn."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_WAITING

    def __init__(self, endpoint: ProgramEndpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = endpoint
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._ends = False

    def server_bind(self) -> None:
        """Skips HTTPServer's look-up of the host's name: there is no resolver."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Waits for a place."""
        while not self._connections.acquire(timeout=_LOOK_S):
            if self._ends:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.release()
            raise

    def shutdown(self) -> None:
        """Ends the waiting too."""
        self._ends = True
        super().shutdown()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives the connection's place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: as a rule a client hung up."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sandbox", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Lists the models: there is one."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "orchestrator"}
        if self._path == "/v1/models":
            self._send(200, {"object": "list", "data": [model]})
        elif self._path == f"/v1/models/{MODEL}":
            self._send(200, model)
        else:
            self._not_found()

    def do_POST(self) -> None:
        """Serves one completion."""
        api = self.server.endpoint.apis.get(self._path)
        if api is None:
            self._not_found()
            return
        try:
            served = self.server.endpoint.serve(api, self._body(), self.connection)
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
        self._not_found()

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
        paths = ", ".join(self.server.endpoint.apis)
        told = f"there is no {self.command} {shown(self._path)}: GET goes to /v1/models, POST to {paths}"
        for path, why in _NOT_SERVED.items():
            if self._path == path or self._path.startswith(f"{path}/"):
                told = why
        error = BadRequest(told, status=404)
        self._refuse(error, self._error(error))

    def _error(self, error: BadRequest) -> dict[str, Any]:
        return messages.error(error) if self._path.startswith("/v1/messages") else openai_error(error)

    def _body(self) -> Body:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9:
            raise BadRequest("a request needs a Content-Length", status=411)
        if int(length) > MAX_BODY_BYTES:
            raise BadRequest(f"a request of more than {MAX_BODY_BYTES} bytes", status=413)
        try:
            body = strict_json(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise BadRequest("the request is no JSON") from None
        if not isinstance(body, dict):
            raise BadRequest("the request is no JSON object")
        return body

    def _refuse(self, error: BadRequest, told: dict[str, Any]) -> None:
        self.server.endpoint.note_refusal(f"{self.command} {self._path[:_MAX_PATH_CHARS]}", error)
        self._send(error.status, told, refused=True)

    def _send(self, status: int, value: dict[str, Any], *, sampled: bool = False, refused: bool = False) -> None:
        content = json.dumps(value).encode()
        # Idle connections would hold places, and the rest of a refused request is not read.
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if sampled:
            self._say_who_samples()
        self.send_header("Connection", "close")
        if refused:
            self.send_header("x-should-retry", "false")  # OpenAI's and Anthropic's clients would ask again
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _stream(self, events: Iterator[Event]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self._say_who_samples()
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in events:
            name = f"event: {event.name}\n" if event.name else ""
            data = "[DONE]" if event.data is None else json.dumps(event.data)
            self.wfile.write(f"{name}data: {data}\n\n".encode())

    def _say_who_samples(self) -> None:
        """Sampling parameters of a request are the run's: no answer may look as if they had been used."""
        self.send_header("x-orchestrator-sampling", "run")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
