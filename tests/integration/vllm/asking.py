"""Completers of a real vLLM, and what they are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.completion.base import Completer, CompletionRequest, Endpoint, Tokenizer, ids_of
from orchestrator.completion.connect import connect
from orchestrator.types import Message, Sampling
from tests.integration.vllm.server import NAME, VllmServer

STORY = "Tell a long story about a cat."


@asynccontextmanager
async def connected(
    server: VllmServer, tokenizer: Any, *, model: str = NAME, key: str = "", **options: Any
) -> AsyncIterator[Completer]:
    completer = await connect(Endpoint(server.base_url, model, key, 600.0), tokenizer, **options)
    try:
        yield completer
    finally:
        await completer.aclose()


def request(
    tokenizer: Tokenizer,
    text: str = STORY,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int = 40,
    seed: int = 1,
    stop: tuple[str, ...] = (),
) -> CompletionRequest:
    talk = (Message("user", text),)
    ids = ids_of(tokenizer.encode(tokenizer.render(talk, generation_prompt=True)))
    return CompletionRequest(
        talk, ids, stop, Sampling(temperature, top_p, max_tokens, seed), "rollout", "task", 0, seed
    )
