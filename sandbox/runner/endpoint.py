"""An OpenAI-compatible endpoint on the sandbox's own loopback device, for an agent that is a program.

`/v1/chat/completions`, streamed or not, and `/v1/models`. Every completion goes through the runner's lease like
any other: budgets hold, and it is recorded. The orchestrator sets model and sampling, so what a request says
about them is ignored; only its stop strings are used. Requests come from code of the worker's identity: they are
bounded and checked, and errors have OpenAI's form.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from sandbox.errors import EpisodeEnd
from sandbox.types import Completion, Message, Role

MODEL = "policy"
MAX_BODY_BYTES = 4 << 20
MAX_CONVERSATION_BYTES = 3 << 20  # must fit a request to the orchestrator
MAX_MESSAGES = 1_000
MAX_STOPS, MAX_STOP_CHARS = 4, 64
_MAX_CONNECTIONS = 16
_IDLE_S = 300.0
_SYSTEM = Message("system", "You are a helpful assistant.")  # for conversations that begin without one
_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "tool": "user", "assistant": "assistant",
}  # fmt: skip

Ask = Callable[[tuple[Message, ...], tuple[str, ...]], Completion]  # conversation, stop strings


class BadRequest(Exception):
    """A request that cannot be served; nothing was sampled."""

    def __init__(self, text: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param = param
        self.status = status


class ProgramEndpoint:
    """`with ProgramEndpoint(ask, ended) as endpoint`: serves until the block is left.

    `ask` is called by one thread at a time. The first EpisodeEnd that it raises goes to `ended`.
    """

    def __init__(self, ask: Ask, ended: Callable[[EpisodeEnd], None]) -> None:
        self._ask = ask
        self._ended = ended
        self._asking = threading.Lock()
        self._over = False
        self._served = 0
        self._server = _Server(self)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ProgramEndpoint:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="endpoint", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def complete(self, body: dict[str, Any]) -> tuple[int, Completion]:
        """(number of the completion, the completion). Raises BadRequest."""
        messages, stop = conversation(body), stop_strings(body)
        with self._asking:
            if self._over:
                raise BadRequest("the rollout is over", status=429)
            try:
                completion = self._ask(messages, stop)
            except EpisodeEnd as end:
                self._over = True
                self._ended(end)
                raise BadRequest("the rollout is over", status=429) from end
            self._served += 1
            return self._served, completion


def conversation(body: dict[str, Any]) -> tuple[Message, ...]:
    """The messages as chat templates take them: one of the system, then user and assistant by turns. Raises
    BadRequest."""
    raw = body.get("messages")
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_MESSAGES:
        raise BadRequest(f"messages must be a list of 1 to {MAX_MESSAGES}", "messages")
    if body.get("tools") or body.get("functions"):
        raise BadRequest("tools are not parsed here: describe them in the prompt, and parse the text", "tools")
    if body.get("n") not in (None, 1):
        raise BadRequest("one completion at a time: n must be 1", "n")
    system: list[str] = []
    talk: list[Message] = []
    for one in raw:
        role, text = _message(one)
        if role == "system" and not talk:
            system.append(text)
            continue
        role = "user" if role == "system" else role  # templates take system messages at the beginning only
        if talk and talk[-1].role == role:
            talk[-1] = Message(role, f"{talk[-1].content}\n\n{text}")
        else:
            talk.append(Message(role, text))
    if not talk or talk[0].role != "user" or talk[-1].role != "user":
        raise BadRequest("the first message after the system's and the last one must be a user's", "messages")
    first = Message("system", "\n\n".join(system)) if system else _SYSTEM
    if sum(len(m.content.encode("utf-8", "replace")) for m in (first, *talk)) > MAX_CONVERSATION_BYTES:
        raise BadRequest(f"a conversation of more than {MAX_CONVERSATION_BYTES} bytes", "messages")
    return (first, *talk)


def stop_strings(body: dict[str, Any]) -> tuple[str, ...]:
    """Raises BadRequest."""
    raw = body.get("stop")
    stops = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a text or a list of at most {MAX_STOPS}", "stop")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise BadRequest(f"each of stop must be a text of 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(stop.encode("utf-8", "replace").decode() for stop in stops)


def _message(one: Any) -> tuple[Role, str]:
    named = one.get("role") if isinstance(one, dict) else None
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise BadRequest(f"each message needs a role, one of {', '.join(_ROLES)}", "messages")
    if one.get("tool_calls") or one.get("function_call"):
        raise BadRequest("tool calls are not known here: keep them in the text", "messages")
    content = one.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequest("the content of a message must be text", "messages")
    return role, content


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    """One thread per connection, at most _MAX_CONNECTIONS."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, endpoint: ProgramEndpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = endpoint
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Skips HTTPServer's look-up of the host's name: there is no resolver."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes a connection above the limit at once."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.release()
            raise

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
        path = self.path.partition("?")[0].rstrip("/")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "orchestrator"}
        if path == "/v1/models":
            self._send(200, {"object": "list", "data": [model]})
        elif path == f"/v1/models/{MODEL}":
            self._send(200, model)
        else:
            self._refuse(
                BadRequest(f"there is no {path[:80]!r}; there are /v1/models and /v1/chat/completions", status=404)
            )

    def do_POST(self) -> None:
        try:
            if self.path.partition("?")[0].rstrip("/") != "/v1/chat/completions":
                raise BadRequest("POST goes to /v1/chat/completions only", status=404)
            body = self._body()
            number, completion = self.server.endpoint.complete(body)
        except BadRequest as error:
            self._refuse(error)
            return
        if body.get("stream") is True:
            options = body.get("stream_options")
            usage = isinstance(options, dict) and options.get("include_usage") is True
            self._stream(number, completion, usage)
        else:
            self._send(200, _completion(number, completion))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9:
            raise BadRequest("a request needs a Content-Length", status=411)
        if int(length) > MAX_BODY_BYTES:
            raise BadRequest(f"a request of more than {MAX_BODY_BYTES} bytes", status=413)
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise BadRequest("the request is no JSON") from None
        if not isinstance(body, dict):
            raise BadRequest("the request is no JSON object")
        return body

    def _refuse(self, error: BadRequest) -> None:
        self.close_connection = True  # the rest of the request is not read
        kind = "invalid_request_error" if error.status != 429 else "rollout_over"
        told = {"message": str(error), "type": kind, "param": error.param, "code": None}
        self._send(error.status, {"error": told})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
            self.send_header("x-should-retry", "false")  # OpenAI's clients would ask again
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, number: int, completion: Completion, usage: bool) -> None:
        """Sends all the text in one event: it was sampled before the first byte is sent."""
        head = {**_head(number), "object": "chat.completion.chunk"}
        text = {"role": "assistant", "content": completion.text}
        events = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}]}
            for delta, end in ((text, None), ({}, completion.finish_reason))
        ]
        if usage:
            events.append({**head, "choices": [], "usage": _usage(completion)})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _head(number: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": MODEL}


def _completion(number: int, completion: Completion) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    return {**_head(number), "choices": [choice], "usage": _usage(completion)}


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = completion.prompt_tokens, completion.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
