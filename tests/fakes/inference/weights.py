"""A scripted server whose weights change while it samples: it aborts, pauses, and goes on with another version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from aiohttp import web

from tests.fakes.inference.dialects.base import Answer, Ask, Refused
from tests.fakes.inference.log import Served
from tests.fakes.inference.script import Call, Reply
from tests.fakes.inference.server import ScriptedServer, _response


@dataclass(frozen=True, slots=True)
class Change:
    """What happens before token `at` of a completion; -1: behind its last one. `version`: the weights from then
    on. `abort`: the completion ends there. `paused_s`: the server then pauses, and has its new weights at the end
    of the pause only."""

    at: int
    version: str | None = None
    abort: bool = False
    paused_s: float = 0.0


Changes = Callable[[Call], Sequence[Change]]


class ChangingServer(ScriptedServer):
    """`changes` of each completion. `told`: what the server says of its weights: `spans` and the last version with
    each answer (SGLang), the last `version` (older ones), when it is `asked` (vLLM in development mode), nothing.

    `refuses`: while it is paused, completions get a 503; else they wait. `truth`: the version of every token of
    each request.
    """

    def __init__(
        self,
        dialect: str,
        *given: Any,
        changes: Changes,
        told: Literal["spans", "version", "asked", "nothing"],
        refuses: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(dialect, *given, **named)
        self.model.weight_version = "v0"
        self.truth: list[tuple[Served, list[str]]] = []
        self.aborts = 0
        self._changes, self._told, self._refuses = changes, told, refuses
        self._going = asyncio.Event()
        self._going.set()

    async def _serve(self, request: web.Request, served: Served) -> web.StreamResponse:
        if request.path == "/is_paused" and self.dialect.name == "vllm":
            return _response({"is_paused": not self._going.is_set()})
        if request.path == "/weight_info" and self._told == "asked":
            return _response({"weight_version": self.model.weight_version})
        if request.method == "POST" and not self._going.is_set():
            if self._refuses:
                raise Refused(503, {"error": {"code": "paused", "message": "paused for new weights"}})
            await self._going.wait()
        return await super()._serve(request, served)

    def _call(self, ask: Ask, served: Served) -> Call:
        text = self.model.decode(ask.prompt_ids)
        begun = text.rpartition("<|im_start|>assistant\n")[2]
        if "<|im_end|>" in begun:
            begun = ""
        if begun:
            ask, whole = replace(ask, prompt_ids=self.model.encode(text[: len(text) - len(begun)])), ask
            call = super()._call(ask, served)
            served.begun, served.prompt_ids = begun, whole.prompt_ids
            return call
        return super()._call(ask, served)

    def _sample(self, ask: Ask, call: Call, reply: Reply, served: Served) -> Answer:
        if served.begun:
            assert reply.text.startswith(served.begun), (reply.text, served.begun)
            reply = replace(reply, text=reply.text.removeprefix(served.begun))
        answer = super()._sample(ask, call, reply, served)
        if served.probe:
            return self._signed(answer, [self.model.weight_version] * len(answer.ids))
        versions: list[str] = []
        for change in (*self._changes(call), Change(len(answer.ids))):
            at = len(answer.ids) if change.at < 0 else change.at
            versions += [self.model.weight_version] * (min(at, len(answer.ids)) - len(versions))
            if change.at >= len(answer.ids):
                break
            if change.paused_s:
                self._pause(change)
            elif change.version is not None:
                self.model.weight_version = change.version
            if change.abort:
                self.aborts += 1
                answer = self._cut(answer, at, served)
                break
        self.truth.append((served, versions))
        return self._signed(answer, versions)

    def _cut(self, answer: Answer, count: int, served: Served) -> Answer:
        served.sampled_ids, served.logprobs = served.sampled_ids[:count], served.logprobs[:count]
        ids, logprobs = answer.ids[:count], (answer.logprobs or [])[:count]
        served.finish, served.sampled_text = "abort", self.model.decode(ids)
        return replace(
            answer, ids=ids, logprobs=logprobs, finish="abort", stopped_by=None, visible=served.sampled_text,
            completion_tokens=count,
        )  # fmt: skip

    def _signed(self, answer: Answer, versions: list[str]) -> Answer:
        if self._told == "spans":
            return replace(answer, signed=True, versions=versions, last_version=self.model.weight_version)
        last = self.model.weight_version if self._told == "version" else None
        return replace(answer, signed=True, last_version=last)

    def _pause(self, change: Change) -> None:
        self._going.clear()

        def go_on() -> None:
            if change.version is not None:
                self.model.weight_version = change.version
            self._going.set()

        asyncio.get_running_loop().call_later(change.paused_s, go_on)
