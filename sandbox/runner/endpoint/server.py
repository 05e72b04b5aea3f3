"""The HTTP server of the endpoint: its address, its paths, and connections with a limit."""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import HTTPServer
from typing import Any, Protocol

from sandbox.errors import ClientGone, EpisodeEnd, RequestRefused
from sandbox.runner.client import hung_up
from sandbox.runner.endpoint import chat, completions, limits, mcp, messages, tools
from sandbox.runner.endpoint.body import MAX_BODY_BYTES as MAX_BODY_BYTES
from sandbox.runner.endpoint.checks import MODEL, TOO_LONG, BadRequest, Body, Event, Served, noting_unused
from sandbox.runner.endpoint.handler import Handler
from sandbox.runner.endpoint.notes import NoteBook
from sandbox.runner.endpoint.responses import Responses
from sandbox.types import Completion, Request, ToolSpec

_MAX_CONNECTIONS, _MAX_WAITING = 40, 256
_LOOK_S = 0.1

# Gets a completion for the request that came over this connection. Raises RequestRefused, ClientGone, EpisodeEnd.
Ask = Callable[[Request, socket.socket], Completion]
# Calls a host tool by its name, with the text of a JSON object. Raises ToolFailure, ClientGone, EpisodeEnd.
CallTool = Callable[[str, str, socket.socket], str]


class Api(Protocol):
    """One API: how it reads a request (raising BadRequest), and how it writes what became of it."""

    def request(self, body: Body, /) -> Request: ...
    def answer(self, served: Served, /) -> dict[str, Any]: ...
    def events(self, served: Served, /) -> Iterator[Event]: ...
    def error(self, error: BadRequest, /) -> dict[str, Any]: ...


class Counter(Api, Protocol):
    """An API that also answers how many tokens the prompt of a request has."""

    def count(self, tokens: int, /) -> dict[str, Any]: ...


# Modules that are imported before there is an endpoint may read its address (see `boot.rooted`). Of no well-known
# service, and no port that the kernel gives to whoever wants any.
PRELOADED_PORT = 63_901


def environment_at(port: int) -> dict[str, str]:
    """By which the clients of OpenAI and Anthropic find an endpoint, and wait for it."""
    url = f"http://127.0.0.1:{port}"
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "sandbox",
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "sandbox",
        "ANTHROPIC_MODEL": MODEL,
        "ORCHESTRATOR_MCP_URL": f"{url}{mcp.PATH}",
        **limits.PATIENCE,
    }


class ProgramEndpoint:
    """It has its address from the start, and answers while it is `serving`. `port` 0: any that is free."""

    def __init__(self, port: int = 0) -> None:
        responses = Responses()
        self.apis: dict[str, Api] = {
            "/v1/chat/completions": chat,
            "/v1/completions": completions,
            "/v1/messages": messages,
            "/v1/responses": responses,
        }
        self.counters: dict[str, Counter] = {
            "/v1/messages/count_tokens": messages,
            "/v1/responses/input_tokens": responses,
        }
        self.context_tokens = 0  # that a conversation may have; 0: not known
        self.notes = NoteBook()
        self._ask: Ask
        self._ended: Callable[[EpisodeEnd], None]
        self._places: threading.Semaphore
        self._tools: Sequence[ToolSpec]
        self._call_tool: CallTool
        self._lock = threading.Lock()  # of the next two
        self._over = False
        self._served = 0
        self._server = Server(self, port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return environment_at(self._server.server_address[1])

    @contextmanager
    def serving(
        self,
        ask: Ask,
        ended: Callable[[EpisodeEnd], None],
        *,
        parallel: int = 1,
        tools: Sequence[ToolSpec] = (),
        call_tool: CallTool = lambda name, arguments, connection: "",
    ) -> Iterator[None]:
        """Serves until the block is left, once. `ask` is called by so many threads at a time. `tools`: of the
        host's, which `call_tool` calls. The first EpisodeEnd that either raises goes to `ended`."""
        self._ask, self._ended = ask, ended
        self._tools, self._call_tool = tools, call_tool
        self._places = threading.Semaphore(parallel)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="endpoint", daemon=True).start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()

    def serve(self, api: Api, body: Body, connection: socket.socket) -> Served:
        """Gets a completion. Raises BadRequest, ClientGone."""
        request = self._request(api, body)
        completion = self._complete(request, connection)
        with self._lock:
            self._served += 1
            return Served(self._served, body, request, tools.as_wanted(completion, body))

    def prompt_tokens(self, api: Api, body: Body, connection: socket.socket) -> int:
        """How many tokens the prompt of a request has. Raises BadRequest, ClientGone."""
        return self._complete(replace(self._request(api, body), count_only=True), connection).prompt_tokens

    def _request(self, api: Api, body: Body) -> Request:
        with noting_unused() as unused:
            request = api.request(body)
        self.notes.add_unused(sorted(unused))
        return request

    def _complete(self, request: Request, connection: socket.socket) -> Completion:
        with self._places:
            if self._over:
                raise BadRequest("the rollout is over", status=429)
            if hung_up(connection):  # while it waited for its place
                raise ClientGone
            try:
                return self._ask(replace(request, notes=self.notes.take()), connection)
            except EpisodeEnd as end:
                self._end(end)
                raise BadRequest("the rollout is over", status=429) from end
            except RequestRefused as refused:
                code = TOO_LONG if refused.too_long else None
                raise BadRequest(str(refused), refused.param or None, code=code) from refused

    def answer_mcp(self, message: mcp.RpcMessage, connection: socket.socket) -> dict[str, Any]:
        """The answer to a message that wants one. Raises ClientGone."""

        def call(name: str, arguments: str) -> str:
            if self._over:
                raise BadRequest("the rollout is over", status=429)
            try:
                return self._call_tool(name, arguments, connection)
            except EpisodeEnd as end:
                self._end(end)
                raise BadRequest("the rollout is over", status=429) from end

        return mcp.answer(message, self._tools, call)

    def _end(self, end: EpisodeEnd) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._ended(end)


class Server(socketserver.ThreadingMixIn, HTTPServer):
    """One thread per connection, at most _MAX_CONNECTIONS; more wait for their turn."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_WAITING

    def __init__(self, endpoint: ProgramEndpoint, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
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
