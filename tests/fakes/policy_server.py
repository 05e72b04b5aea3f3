"""A model server in a thread of its own, whose weights a trainer replaces: by handing them over, from a folder as
SGLang does, or by LoRA adapters as vLLM does in its development mode.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import transformers
from aiohttp import web

from tests.fakes.inference.dialects.base import Ask, Refused
from tests.fakes.inference.log import Served
from tests.fakes.inference.script import Script
from tests.fakes.inference.server import _response
from tests.fakes.model_server import ModelServer
from tests.fakes.tiny_model import merged

T = TypeVar("T")
MAX_LORAS = 8


class PolicyServer(ModelServer):
    """`take` replaces weights from any thread, between two completions. `updates` counts how often that was done,
    `calls` are the trainer's own requests, `sampled_under` the name that each completion was asked for by."""

    def __init__(self, dialect: str, policy: transformers.PreTrainedModel, script: Script, **more: Any) -> None:
        super().__init__(dialect, policy, script, **more)
        self.updates = 0
        self.calls: list[str] = []
        self.sampled_under: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self._adapters: dict[str, transformers.PreTrainedModel] = {}
        self._going = asyncio.Event()
        self._going.set()

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies these weights."""

        def load() -> None:
            own = dict(self._policy.named_parameters())
            with torch.no_grad():
                for name, weight in weights:
                    own[name].copy_(weight)
            self.updates += 1

        self.between(load)

    def pause(self) -> None:
        self.between(self._going.clear)

    def resume(self) -> None:
        self.between(self._going.set)

    def between(self, do: Callable[[], T]) -> T:
        """Its result. Done in the server's thread, so never in the middle of a completion."""
        assert self.loop is not None

        async def done() -> T:
            return do()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result()

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        body = await super()._body(request)
        name = body.get("model")
        return {**body, "model": self.model.name, "user": name} if name in self._adapters else body

    def _policy_of(self, ask: Ask) -> transformers.PreTrainedModel:
        name = getattr(ask.request, "user", None) or self.model.name
        self.sampled_under.append(name)
        return self._adapters.get(name, self._policy)

    async def _serve(self, request: web.Request, served: Served) -> web.StreamResponse:
        known = {
            "/update_weights_from_disk": self._from_disk,
            "/pause": self._paused,
            "/resume": self._resumed,
            "/is_paused": self._told_pause,
            "/server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        if (call := known.get(request.path)) is not None:
            self.calls.append(request.path)
            return _response(call(await super()._body(request)))
        if request.method == "POST" and "completions" in request.path:
            await self._going.wait()
        return await super()._serve(request, served)

    def _from_disk(self, body: Mapping[str, Any]) -> Any:
        """SGLang's; `weight_version` is then told with each answer."""
        loaded = transformers.AutoModelForCausalLM.from_pretrained(body["model_path"]).eval()
        self._policy.load_state_dict(loaded.state_dict())
        self.model.weight_version = body.get("weight_version") or self.model.weight_version
        self.updates += 1
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _paused(self, body: Mapping[str, Any]) -> Any:
        self._going.clear()
        return {"status": "paused"}

    def _resumed(self, body: Mapping[str, Any]) -> Any:
        self._going.set()
        return {"status": "resumed"}

    def _told_pause(self, body: Mapping[str, Any]) -> Any:
        return {"is_paused": not self._going.is_set()}

    def _server_info(self, body: Mapping[str, Any]) -> Any:
        lora = {"max_lora_rank": 16, "max_loras": MAX_LORAS}
        return {"vllm_config": {"lora_config": lora, "parallel_config": {"data_parallel_size": 1}}}

    def _models(self, body: Mapping[str, Any]) -> Any:
        told: Any = self.dialect.query("GET", "/v1/models", {}, self.model)
        cards = [{**told["data"][0], "id": name, "parent": self.model.name} for name in self._adapters]
        return {**told, "data": [*told["data"], *cards]}

    def _load_adapter(self, body: Mapping[str, Any]) -> Any:
        if body["lora_name"] in self._adapters:
            raise Refused(400, self.dialect.error(400, "the adapter has been loaded already"))
        self._adapters[body["lora_name"]] = merged(self._policy, body["lora_path"])
        self.updates += 1
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _unload_adapter(self, body: Mapping[str, Any]) -> Any:
        self._adapters.pop(body["lora_name"], None)
        return f"Success: LoRA adapter '{body['lora_name']}' removed successfully."


@contextmanager
def serving(
    dialect: str, policy: transformers.PreTrainedModel, script: Script, **more: Any
) -> Iterator[PolicyServer]:
    """The server, in a thread of its own until the block is left."""
    ready: threading.Event = threading.Event()
    over: list[asyncio.Event] = []
    server = PolicyServer(dialect, policy, script, **more)

    async def serve() -> None:
        over.append(asyncio.Event())
        async with server:
            server.loop = asyncio.get_running_loop()
            ready.set()
            await over[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="policy server")
    thread.start()
    assert ready.wait(60), "the server does not start"
    try:
        yield server
    finally:
        assert server.loop is not None
        server.loop.call_soon_threadsafe(over[0].set)
        thread.join()
