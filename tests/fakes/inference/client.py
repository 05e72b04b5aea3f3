"""What a careful client sends to each dialect, and how it reads the answer: for tests without our completers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.fakes.inference.model import ChatMessage, Model
from tests.fakes.inference.server import ScriptedServer

STOP = ("Observation:", "</code>")
TASK = (ChatMessage("system", "Be brief."), ChatMessage("user", "New task:\nadd numbers"))
PATHS = {
    "vllm": "/v1/completions",
    "sglang": "/generate",
    "llamacpp": "/completion",
    "atropos": "/generate",
    "openai": "/v1/chat/completions",
}


def a_body(dialect: str, prompt: list[int], max_tokens: int = 200, stop: Sequence[str] = STOP) -> dict[str, Any]:
    """A request for a completion that wants ids, log-probs and the stop string. Chat: always `TASK`."""
    match dialect:
        case "vllm":
            more: dict[str, Any] = {"logprobs": 0, "return_token_ids": True, "include_stop_str_in_output": True}
            more |= {"max_tokens": max_tokens, "stop": stop, "skip_special_tokens": False}
            return {"model": "scripted", "prompt": prompt, **more}
        case "sglang":
            sampling = {"max_new_tokens": max_tokens, "stop": stop, "no_stop_trim": True}
            sampling |= {"skip_special_tokens": False}
            return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        case "llamacpp":
            more = {"n_predict": max_tokens, "stop": stop, "stream": True, "n_probs": 1, "return_tokens": True}
            return {"prompt": prompt, **more}
        case "atropos":
            more = {"max_tokens": max_tokens, "stop": stop, "logprobs": 0, "include_stop_str_in_output": True}
            return {"prompt": {"prompt_token_ids": prompt}, **more}
    messages = [{"role": m.role, "content": m.content} for m in TASK]
    return {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "stop": stop, "logprobs": True}


async def ask(server: ScriptedServer, body: Any, path: str = "", **headers: str) -> tuple[int, Any]:
    """(status, answer) of one request; the events of a stream as a list."""
    path = path or PATHS[server.dialect.name]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(server.url + path, json=body, headers=headers) as response,
    ):
        text = (await response.read()).decode("utf-8", "replace")
        if response.content_type == "text/event-stream":
            lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
            return response.status, [json.loads(line) for line in lines]
        return response.status, json.loads(text) if response.content_type == "application/json" else text


def told(dialect: str, answer: Any) -> tuple[list[int], list[float], str | None, str]:
    """(ids, log-probs, text, why it ended) of an id-in dialect's answer."""
    match dialect:
        case "vllm":
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            return choice["token_ids"], logprobs, choice["text"], choice["finish_reason"]
        case "sglang":
            meta = answer["meta_info"]
            ids = [entry[1] for entry in meta["output_token_logprobs"]]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            return ids, logprobs, answer["text"], meta["finish_reason"]["type"]
        case "llamacpp":
            ids = [i for event in answer for i in event["tokens"]]
            logprobs = [e["logprob"] for event in answer for e in event.get("completion_probabilities", ())]
            text = "".join(event["content"] for event in answer)
            return ids, logprobs, text, "length" if answer[-1]["stop_type"] == "limit" else "stop"
    pairs = [item for (entry,) in answer["logprobs"][0] for item in entry.items()]
    return [int(i) for i, _ in pairs], [p for _, p in pairs], answer["text"][0], answer["finish_reasons"][0]


def prompt_of(model: Model, messages: tuple[ChatMessage, ...] = TASK) -> list[int]:
    """The ids of a conversation, ready for the next turn."""
    return model.encode(model.render(messages))
