"""The vLLM of tests/fakes says what a real one says: the same requests, and their answers side by side."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.tokenizer import HubTokenizer
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.inference.model import Model
from tests.integration.vllm.asking import request
from tests.integration.vllm.server import CONTEXT, NAME, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
OURS = {"model": NAME, "max_tokens": 4, "temperature": 1.0, "seed": 1}
TALK = [{"role": "user", "content": "Say hello."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "nowhere": ("/nowhere", None),
    "a GET of completions": (COMPLETIONS, None),
    "a completion": (COMPLETIONS, {**OURS, "prompt": [11, 12], "logprobs": 0, "return_token_ids": True}),
    "without log-probs and ids": (COMPLETIONS, {**OURS, "prompt": [11, 12]}),
    "no prompt": (COMPLETIONS, {**OURS, "prompt": []}),
    "an id that there is not": (COMPLETIONS, {**OURS, "prompt": [10**6]}),
    "another model": (COMPLETIONS, {**OURS, "prompt": [11], "model": "another"}),
    "a number as text": (COMPLETIONS, {**OURS, "prompt": [11], "max_tokens": "x"}),
    "nothing to sample": (COMPLETIONS, {**OURS, "prompt": [11], "max_tokens": 0}),
    "a full context": (COMPLETIONS, {**OURS, "prompt": [11] * CONTEXT}),
    "one too many": (COMPLETIONS, {**OURS, "prompt": [11] * (CONTEXT + 1)}),
    "far too many": (COMPLETIONS, {**OURS, "prompt": [11] * (CONTEXT + 99)}),
    "more than it holds": (COMPLETIONS, {**OURS, "prompt": [11], "max_tokens": CONTEXT + 1}),
    "more than fits": (COMPLETIONS, {**OURS, "prompt": [11] * (CONTEXT - 2), "ignore_eos": True}),
    "a temperature below zero": (COMPLETIONS, {**OURS, "prompt": [11], "temperature": -1}),
    "a chat": (CHATS, {**OURS, "messages": TALK, "logprobs": True}),
    "a chat with ids": (CHATS, {**OURS, "messages": TALK, "logprobs": True, "return_token_ids": True}),
    "a chat of another model": (CHATS, {**OURS, "messages": TALK, "model": "another"}),
    "a chat with tools": (CHATS, {**OURS, "messages": TALK, "tools": TOOLS}),
    "a chat that is too long": (CHATS, {**OURS, "messages": [{"role": "user", "content": "go " * 2 * CONTEXT}]}),
    "a chat without messages": (CHATS, {**OURS, "messages": []}),
    "a chat for more than it holds": (CHATS, {**OURS, "messages": TALK, "max_tokens": CONTEXT + 1}),
    "tokens of a text": ("/tokenize", {"model": NAME, "prompt": "Hello <|im_start|>"}),
    "tokens of nothing": ("/tokenize", {"model": NAME}),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_the_fake_answers_as_the_real_one(plain: VllmServer, folder: Path, what: str) -> None:
    path, body = REQUESTS[what]
    model = Model(folder, context_length=CONTEXT, name=NAME)
    async with ScriptedServer("vllm", always("Hello, there, you all!"), model=model) as fake:
        theirs = await asyncio.to_thread(plain.ask, path, body)
        ours = await asyncio.to_thread(VllmServer.ask, _At(int(fake.url.rpartition(":")[2])), path, body)
    assert shape(ours) == shape(theirs)


class _At(VllmServer):
    """Asks a server that is there already."""

    def __init__(self, port: int) -> None:
        self.port = port


def shape(answer: Any) -> Any:
    """An answer without what may differ: numbers, texts and drawn names. Errors are kept word for word."""
    status, told = answer
    if status != 200 and isinstance(told, dict):
        return status, told
    return status, _shape(told)


def _shape(value: Any, name: str = "") -> Any:
    if isinstance(value, dict) and name == "top_logprobs":
        return "top"
    if isinstance(value, dict):
        return {key: _shape(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_shape(value[0], name)] if value and name in ("choices", "data") else "list"
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{8,}|\d+", "#", value) if name in ("id", "object", "owned_by") else "text"
    return None if value is None else "bool" if isinstance(value, bool) else "number"


async def test_the_fake_ends_a_completion_with_the_same_ids(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    """A stop string in the middle of a token; an end token: what is in text, ids and reasons."""
    asked = request(tokenizer, "Count from one to ten in words, comma separated.")
    whole = "One, Two, Three, Four, Five, Six, Seven, Eight, Nine, Ten<|im_end|>"
    body = {**OURS, "temperature": 0.0, "max_tokens": 40, "prompt": list(asked.prompt_ids or ())}
    body |= {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
    model = Model(Path(tokenizer.name), context_length=CONTEXT, name=NAME)
    async with ScriptedServer("vllm", always(whole), model=model) as fake:
        for stop in (None, [" Thr"], ["o, T"], ["Two", "Nine"]):
            for kept in (True, False):
                this = {**body, "stop": stop, "include_stop_str_in_output": kept}
                theirs = await asyncio.to_thread(plain.post, COMPLETIONS, **this)
                port = int(fake.url.rpartition(":")[2])
                ours = await asyncio.to_thread(lambda port=port, this=this: _At(port).post(COMPLETIONS, **this))
                names = ("text", "finish_reason", "stop_reason", "token_ids")
                assert [ours["choices"][0][n] for n in names] == [theirs["choices"][0][n] for n in names]
                assert ours["usage"] == theirs["usage"]
