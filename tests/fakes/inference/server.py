"""A real HTTP server on a loopback port that answers completions from a script.

async with ScriptedServer("vllm", script=always("<code>\\nfinal_answer(1)\\n</code>")) as server:
    ...server.base_url, server.log.completions...
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from time import time
from typing import Any, Self

import orjson
from aiohttp import web

from tests.fakes.inference.dialects import DIALECTS
from tests.fakes.inference.dialects.base import JSON, Answer, Ask, Dialect, Endpoint, Refused
from tests.fakes.inference.faults import Fault, FaultPlan
from tests.fakes.inference.log import PROBE_HEADER, Log, Served
from tests.fakes.inference.model import Model, PrefixCache, logprob
from tests.fakes.inference.sampling import TIDY, Awkward, sample
from tests.fakes.inference.script import Call, CallReader, Reply, Script, always
from tests.fakes.tokenizer import tokenizer_folder

LOG_PATH = "/_log"
_STATUS_TEXT = {
    400: "The request is not to our taste.",
    402: "Insufficient Balance",
    404: "no such route",
    429: "Rate limit reached for requests",
    500: "The server had an error while processing your request.",
    502: "Bad gateway",
    503: "The server is overloaded or not ready yet.",
    504: "Gateway timeout",
}


class ScriptedServer:
    """One inference server in one dialect. Nothing is shared between two of them.

    Everything a test needs is in `log`; `model.weight_version` may be set while it serves. `loading`: the fault
    that a request for this path meets, the model list included, while it loads; None: it serves.
    """

    def __init__(
        self,
        dialect: str | Dialect = "openai",
        script: Script | None = None,
        *,
        model: Model | None = None,
        awkward: Awkward = TIDY,
        seed: int = 0,
        faults: FaultPlan | tuple[Fault, ...] = (),
        delay_s: float = 0.0,
        api_key: str = "",
        log_file: Path | None = None,
        port: int = 0,
        loading: Callable[[str], Fault | None] = lambda path: None,
    ) -> None:
        self.dialect = DIALECTS[dialect]() if isinstance(dialect, str) else dialect
        self.model = model or Model(tokenizer_folder())
        self.log = Log(log_file)
        self._script = script or always("I do not know.")
        self._awkward = awkward
        self._seed = seed
        self._faults = faults if isinstance(faults, FaultPlan) else FaultPlan(faults, seed)
        self._delay_s = delay_s
        self._api_key = api_key
        self._port = port
        self._loading = loading
        self.at_most: int | None = None  # so many completions; those after them wait until this is changed
        self._calls = CallReader()
        self._cache = PrefixCache()
        self._draws: Counter[int] = Counter()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The server without any path."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_url(self) -> str:
        """What goes into `openai.base_url`."""
        return f"{self.url}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Cancelled handlers are how a client's going away is noticed.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == LOG_PATH:
            return web.Response(text=self.log.as_json(), content_type="application/json")
        served = Served(
            method=request.method,
            path=request.path,
            headers={name.lower(): value for name, value in request.headers.items()},
            body=None,
            started_s=time(),
            dialect=self.dialect.name,
            probe=PROBE_HEADER in request.headers,
        )
        self.log.begin(served)
        try:
            response = await self._serve(request, served)
            served.status = None if served.fault == "reset" else response.status
            return response
        except Refused as refused:
            served.status, served.refusal = refused.status, refused.reason
            return _response(refused.body, refused.status)
        except (asyncio.CancelledError, ConnectionError):
            served.disconnected = True
            raise
        finally:
            served.ended_s = time()
            self.log.end(served)

    async def _serve(self, request: web.Request, served: Served) -> web.StreamResponse:
        self._authorize(request)
        body = await self._body(request)
        served.body = body
        if fault := self._loading(request.path):
            served.fault = fault.kind
            return await self._instead(fault, None, request) or web.Response(status=500)
        endpoint = self.dialect.endpoints.get(request.path)
        if endpoint is None or request.method != "POST":
            return _response(self.dialect.query(request.method, request.path, body, self.model))
        ask = endpoint.parse(body, self.model)
        call = self._call(ask, served)
        reply = self._script(call)
        reply = Reply(reply) if isinstance(reply, str) else reply
        if served.probe:  # only faults that name probes are meant for them
            reply = replace(reply, delay_s=0.0, fault=None)
        fault = reply.fault or self._faults.meets(call)
        served.fault = fault.kind if fault else None
        if not served.probe and (delay_s := reply.delay_s or self._delay_s):
            await asyncio.sleep(delay_s)
        if fault and (instead := await self._instead(fault, ask, request)):
            return instead
        limit = self.model.context_length
        if refused := self.dialect.too_long(
            len(ask.prompt_ids), 1 if ask.max_tokens is None else ask.max_tokens, limit
        ):
            raise refused
        while not served.probe and self.at_most is not None and self.log.sampled >= self.at_most:
            await asyncio.sleep(0.01)
        answer = self._sample(ask, call, reply, served)
        return await self._send(request, endpoint, ask, _spoil(answer, fault, self.model), fault)

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._api_key and given != self._api_key and request.path != "/health":
            raise Refused(401, self.dialect.unauthorized(401, given))

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        raw = await request.read()
        if not raw:
            return {}
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise Refused(400, self.dialect.error(400, f"JSON decode error: {error}")) from error
        if not isinstance(body, dict):
            raise Refused(400, self.dialect.error(400, "the body is no JSON object"))
        return body

    def _call(self, ask: Ask, served: Served) -> Call:
        messages = ask.messages
        if messages is None:
            messages = self.model.read_messages(self.model.decode(ask.prompt_ids))
        left = self.model.context_length - len(ask.prompt_ids)
        call = self._calls.read(
            messages,
            probe=served.probe,
            seed=ask.seed,
            max_tokens=left if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
        )
        served.call, served.prompt_ids, served.left_to_default = call, ask.prompt_ids, ask.left_to_default
        return call

    async def _instead(self, fault: Fault, ask: Ask | None, request: web.Request) -> web.StreamResponse | None:
        """What is sent in the place of an answer; None: the answer comes, late or spoilt."""
        match fault.kind:
            case "slow":
                await asyncio.sleep(fault.after_s)
            case "hang":
                await asyncio.Event().wait()
            case "reset":
                return _reset(request)
            case "garbage":
                kind = "text/event-stream" if ask and ask.stream else "application/json"
                return web.Response(body=b"data: \xff\xfe<html>{[\n\n", content_type=kind)
            case "context_length":
                limit = self.model.context_length
                raise self.dialect.too_long(limit + 1, (ask and ask.max_tokens) or 1, limit) or Refused(
                    400, self.dialect.error(400, "too long")
                )
            case "401" | "403":
                given = request.headers.get("Authorization", "").removeprefix("Bearer ")
                raise Refused(int(fault.kind), self.dialect.unauthorized(int(fault.kind), given))
            case "quota":
                error = {"message": "You exceeded your current quota.", "type": "insufficient_quota"}
                return _response({"error": {**error, "code": "insufficient_quota"}}, 429)
            case "400" | "402" | "404" | "429" | "500" | "502" | "503" | "504":
                status = int(fault.kind)
                headers = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
                return _response(self.dialect.error(status, _STATUS_TEXT[status]), status, headers)
        return None

    def _sample(self, ask: Ask, call: Call, reply: Reply, served: Served) -> Answer:
        model, prompt = self.model, ask.prompt_ids
        # A request with a seed draws the same each time, one without draws anew.
        key = zlib.crc32(array("I", prompt).tobytes())
        draw = Random(f"{self._seed}:{key}:{self._draws[key] if ask.seed is None else f'seed {ask.seed}'}")
        self._draws[key] += 1
        forced = None if ask.forced is None else model.decode([ask.forced])
        sampled = sample(
            model,
            reply.text if forced is None else forced,
            stop=ask.stop,
            max_tokens=max(1, min(call.max_tokens, model.context_length - len(prompt))),
            ignore_end=ask.ignore_end,
            open_end=reply.length or forced is not None,
            awkward=self._awkward if forced is None else TIDY,
            rng=draw,
        )
        served.sampled_ids = sampled.ids
        served.logprobs = [logprob(i, len(prompt) + n) for n, i in enumerate(sampled.ids)]
        served.sampled_text = model.decode(sampled.ids)
        served.finish, served.stopped_by = sampled.finish, sampled.stopped_by
        served.cached, served.weight_version = self._cache.cached(prompt), model.weight_version
        self._cache.keep(prompt, sampled.ids)
        visible = model.decode_bytes(sampled.ids)[: sampled.visible_bytes].decode("utf-8", "replace")
        return Answer(
            ids=sampled.ids,
            logprobs=served.logprobs,
            finish=sampled.finish,
            stopped_by=sampled.stopped_by,
            visible=visible,
            prompt_ids=prompt,
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled.ids),
            cached=served.cached,
            number=len(self.log.all),
        )

    async def _send(
        self, request: web.Request, endpoint: Endpoint, ask: Ask, answer: Answer, fault: Fault | None
    ) -> web.StreamResponse:
        cut_off, nan = (fault is not None and fault.kind == kind for kind in ("cut_off", "nan_logprob"))
        if not ask.stream:
            whole = _dumps(endpoint.answer(ask, answer, self.model), nan=nan)
            if not cut_off:
                return web.Response(body=whole, content_type="application/json")
            sent, kind = whole[: len(whole) // 2], "application/json"
        else:
            events = endpoint.events(ask, answer, self.model)
            told = events[:-1] if cut_off else events
            sent = b"".join(b"data: " + _dumps(event, nan=nan) + b"\n\n" for event in told)
            kind = "text/event-stream"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(sent)
        if cut_off and request.transport is not None:
            request.transport.close()
        else:
            await response.write_eof()
        return response


def _spoil(answer: Answer, fault: Fault | None, model: Model) -> Answer:
    """The answer with the fault in it."""
    logprobs = answer.logprobs or []
    match fault.kind if fault else None:
        case "empty_choices":
            return replace(answer, empty=True)
        case "null_content":
            return replace(answer, text_null=True)
        case "content_filter":
            return replace(answer, finish="content_filter", text_null=True)
        case "finish":
            return replace(answer, finish=fault.word if fault else "")  # type: ignore[arg-type]
        case "missing_logprobs":
            return replace(answer, logprobs=None)
        case "fewer_logprobs":
            return replace(answer, logprobs=logprobs[:-1])
        case "foreign_ids":
            return replace(answer, ids=[model.size + 7, *answer.ids[1:]])
        case "nan_logprob":
            return replace(answer, logprobs=[float("nan"), *logprobs[1:]])
        case "positive_logprob":
            return replace(answer, logprobs=[0.5, *logprobs[1:]])
        case "other_prompt":  # as long as the one that was asked with
            return replace(answer, prompt_ids=[*answer.prompt_ids[:-1], answer.prompt_ids[-1] - 1])
        case "wrong_count":
            return replace(
                answer, prompt_tokens=answer.prompt_tokens - 1, completion_tokens=answer.completion_tokens - 1
            )
    return answer


def _response(body: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    if isinstance(body, str):
        return web.Response(text=body, status=status, headers=headers)
    return web.Response(body=_dumps(body), status=status, headers=headers, content_type="application/json")


def _dumps(body: JSON, *, nan: bool = False) -> bytes:
    """JSON. `nan`: there may be NaN in it, which orjson would make null of."""
    return json.dumps(body).encode() if nan else orjson.dumps(body)


def _reset(request: web.Request) -> web.StreamResponse:
    """Drops the connection without a goodbye."""
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response(status=500)
