"""`/v1/chat/completions`, as OpenAI defined it and as its many relatives serve it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.fakes.inference.dialects.base import (
    JSON,
    Answer,
    Ask,
    Dialect,
    Refused,
    left_to_default,
    no_stream,
    stops,
)
from tests.fakes.inference.model import Model, as_messages

SAMPLING = frozenset(["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n"])
# Parameters of OpenAI's relatives. They take each other's, or at least do not mind them.
EXTRAS = frozenset(
    [
        "top_k",
        "min_p",
        "repetition_penalty",
        "repeat_penalty",
        "return_token_ids",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "no_stop_trim",
        "add_generation_prompt",
        "chat_template_kwargs",
        "cache_prompt",
        "timings_per_token",
        "n_probs",
    ]
)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
# Which sampled ids have an entry in `logprobs.content`: those of the visible text; all, end token and stop
# string included; or, as llama.cpp does without streaming, all but as many as the stop string has ids.
Entries = Literal["visible", "all", "llamacpp"]


def _call(number: int, told: Mapping[str, Any]) -> JSON:
    function = {"name": told["name"], "arguments": json.dumps(told["arguments"])}
    return {"id": f"call_{number}", "type": "function", "function": function}


class ChatRequest(BaseModel):
    """OpenAI's own fields; others are kept apart in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class ChatCompletions:
    """One server's chat endpoint.

    hosted: refuses what OpenAI's service does not know. `new_limit`: takes max_completion_tokens only.
    ids_in_logprobs: log-prob entries have an `id`. token_ids: knows `return_token_ids`. no_tools: how it refuses
    tools that the model may call; empty: it takes them.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        hosted: bool = False,
        new_limit: bool = False,
        ids_in_logprobs: bool = False,
        token_ids: bool = False,
        entries: Entries = "visible",
        no_tools: str = "",
    ) -> None:
        self._dialect = dialect
        self._hosted = hosted
        self._new_limit = new_limit
        self._ids_in_logprobs = ids_in_logprobs
        self._token_ids = token_ids
        self._entries = entries
        self._no_tools = no_tools

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        try:
            request = ChatRequest.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise self._refused(f"Invalid value for '{place}': {first['msg']}.") from error
        self._check_extras(request)
        if request.model != model.name:
            raise Refused(404, self._dialect.error(404, f"The model `{request.model}` does not exist."))
        if request.n not in (None, 1) or request.stream:
            raise self._refused("this scripted server gives one completion, in one piece")
        if self._no_tools and request.tools and request.tool_choice in (None, "auto"):
            raise self._refused(self._no_tools)
        if self._new_limit and request.max_tokens is not None:
            raise self._refused(
                "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead."
            )
        prompt = model.render_tools(deepcopy(request.messages), request.tools) if request.tools else None
        messages = as_messages(request.messages)
        return Ask(
            request=request,
            prompt_ids=model.encode(prompt or model.render(messages)),
            messages=messages,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stop=stops(request.stop),
            seed=request.seed,
            left_to_default=left_to_default(request, SAMPLING),
        )

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        request: ChatRequest = ask.request
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text(model, stop_string=False, skip_special=True),
            "refusal": None,
        }
        calls = _CALL.findall(message["content"]) if request.tools else []
        if calls:
            message["content"] = message["content"].partition("<tool_call>")[0].strip() or None
            message["tool_calls"] = [_call(number, json.loads(text)) for number, text in enumerate(calls)]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._content(ask, answer, model)} if request.logprobs else None,
            "finish_reason": "tool_calls" if calls else answer.finish,
        }
        whole: dict[str, Any] = {
            "id": f"chatcmpl-{answer.number}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": model.name,
            "choices": [] if answer.empty else [choice],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
            "system_fingerprint": None,
        }
        if self._token_ids and (request.model_extra or {}).get("return_token_ids"):
            choice["token_ids"] = answer.ids
            whole["prompt_token_ids"] = answer.prompt_ids
        return whole

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        raise NotImplementedError(no_stream("chat"))

    def _content(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        if answer.logprobs is None:
            return None
        entries = []
        for token_id, value in list(zip(answer.ids, answer.logprobs, strict=False))[: self._count(answer, model)]:
            piece = b"" if token_id in model.special or token_id >= model.size else model.pieces[token_id]
            entry = {"token": piece.decode("utf-8", "replace"), "logprob": value, "bytes": list(piece)}
            entries.append({**entry, "top_logprobs": [], **({"id": token_id} if self._ids_in_logprobs else {})})
        return entries

    def _count(self, answer: Answer, model: Model) -> int:
        ids = answer.ids
        if self._entries == "all" or answer.stopped_by is None:
            return len(ids)
        if self._entries == "llamacpp":
            string = answer.stopped_by if isinstance(answer.stopped_by, str) else ""
            return len(ids) - min(len(ids), len(model.encode(string)))
        size, visible = 0, len(answer.visible.encode())
        for count, token_id in enumerate(ids):
            if size >= visible:
                return count
            size += len(model.pieces[token_id]) if token_id < model.size else 0
        return len(ids)

    def _check_extras(self, request: ChatRequest) -> None:
        unknown = sorted(set(request.model_extra or {}) - (frozenset() if self._hosted else EXTRAS))
        if unknown:
            plural = "s" if len(unknown) > 1 else ""
            raise self._refused(f"Unrecognized request argument{plural} supplied: {', '.join(unknown)}")

    def _refused(self, message: str) -> Refused:
        return Refused(400, self._dialect.error(400, message))
