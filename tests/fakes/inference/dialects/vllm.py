"""vLLM's OpenAI server: `/v1/completions` with ids in and ids out.

After vLLM's CompletionRequest and CompletionResponse. It ignores fields it does not know; this one
refuses them, with the body vLLM has for fields of a wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tests.fakes.inference.dialects.base import (
    JSON,
    Answer,
    Ask,
    Endpoint,
    Refused,
    Strict,
    left_to_default,
    masked,
    no_stream,
    stops,
)
from tests.fakes.inference.dialects.chat import ChatCompletions
from tests.fakes.inference.model import Model, as_messages, logprob

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-3444220e"
_PROMPTS = ("prompt", "messages")
_TRANSFER = ("kv_transfer_params", "ec_transfer_params", "metrics")
SAMPLING = frozenset(
    [
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "n",
        "ignore_eos",
        "min_tokens",
    ]
)


class CompletionRequest(Strict):
    """The fields of vLLM's CompletionRequest, without those for transfer, and of structured output one alone."""

    model: str | None = None
    prompt: list[Annotated[int, Field(ge=0)]] | str
    echo: bool | None = False
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = Field(None, ge=-1)
    max_tokens: int | None = Field(16, ge=0)
    n: int = 1
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    priority: int = 0
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None


class Completions:
    """`/v1/completions`."""

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        try:
            request = CompletionRequest.model_validate(body)
        except ValidationError as error:
            raise Refused(400, VllmDialect.invalid(error)) from error
        VllmDialect.check_model(request.model, model)
        if (value := request.temperature) is not None and value < 0:
            raise VllmDialect.refused("temperature", value, f"temperature must be non-negative, got {value}.")
        if (value := request.top_p) is not None and not 0 < value <= 1:
            raise VllmDialect.refused("top_p", value, f"top_p must be in (0, 1], got {value}.")
        if request.n != 1 or request.echo or request.use_beam_search or request.stream:
            raise Refused(400, VllmDialect.body("this scripted vLLM gives one plain completion", 400))
        ids = request.prompt if isinstance(request.prompt, list) else model.encode(request.prompt)
        if not ids:
            raise Refused(400, VllmDialect.body("You must pass at least one prompt", 400))
        if max(ids) >= model.size:
            raise Refused(400, VllmDialect.body(f"Token id {max(ids)} is out of vocabulary", 400))
        return Ask(
            request=request,
            prompt_ids=ids,
            messages=None,
            max_tokens=16 if request.max_tokens is None else request.max_tokens,
            stop=stops(request.stop),
            seed=request.seed,
            left_to_default=left_to_default(request, SAMPLING),
            ignore_end=request.ignore_eos,
        )

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        request: CompletionRequest = ask.request
        text = answer.text(
            model,
            stop_string=request.include_stop_str_in_output,
            # vLLM prints the end token only where both are asked for.
            skip_special=request.skip_special_tokens or not request.include_stop_str_in_output,
        )
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(request, answer, model) if request.logprobs is not None else None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stopped_by if isinstance(answer.stopped_by, str) else None,
            "token_ids": answer.ids if request.return_token_ids else None,
            "prompt_logprobs": None if request.prompt_logprobs is None else self._prompt_logprobs(ask, model),
            "prompt_token_ids": answer.prompt_ids if request.return_token_ids else None,
            "routed_experts": None,
        }
        return {
            "id": f"cmpl-{answer.number}",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": model.name,
            "choices": [] if answer.empty else [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
                "completion_tokens": answer.completion_tokens,
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            **dict.fromkeys(_TRANSFER),
            **({"weight_version": answer.last_version} if answer.last_version is not None else {}),
        }

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        raise NotImplementedError(no_stream("vLLM"))

    def _prompt_logprobs(self, ask: Ask, model: Model) -> JSON:
        """The first id is behind nothing."""
        entries = [
            {str(token): {"logprob": logprob(token, place), "rank": 1, "decoded_token": model.decode([token])}}
            for place, token in enumerate(ask.prompt_ids)
        ]
        return [None, *entries[1:]]

    def _logprobs(self, request: CompletionRequest, answer: Answer, model: Model) -> JSON:
        """The legacy shape of OpenAI's completions."""
        if answer.logprobs is None:
            return None
        guided = (request.response_format or {}).get("type", "text") != "text"
        tokens, offsets, offset = [], [], 0
        for token_id in answer.ids:
            token = "" if token_id >= model.size else model.decode([token_id])
            tokens.append(f"token_id:{token_id}" if request.return_tokens_as_token_ids else token)
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": masked(answer.logprobs) if guided else answer.logprobs,
            "tokens": tokens,
            "top_logprobs": [{t: p} for t, p in zip(tokens, answer.logprobs, strict=False)],
        }


class Chats(ChatCompletions):
    """`/v1/chat/completions`."""

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        VllmDialect.check_model(body.get("model"), model)
        if body.get("messages") == []:
            told = "Cannot apply chat template to an empty conversation. Provide at least one message."
            raise Refused(400, VllmDialect.body(told, 400))
        ask = super().parse(body, model)
        if len(ask.prompt_ids) > model.context_length:  # a text is encoded no further
            raise VllmDialect.full(model.context_length + 1, model.context_length)
        return ask

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        whole = super().answer(ask, answer, model)
        ids = (ask.request.model_extra or {}).get("return_token_ids")
        for choice in whole["choices"]:
            choice["message"] |= {"annotations": None, "audio": None, "function_call": None, "reasoning": None}
            stopped = answer.stopped_by if isinstance(answer.stopped_by, str) else None
            choice |= {"stop_reason": stopped, "token_ids": answer.ids if ids else None, "routed_experts": None}
        whole["usage"] |= {"prompt_tokens_details": None, "completion_tokens_details": None}
        more = dict.fromkeys(("prompt_logprobs", "prompt_text", *_TRANSFER))
        prompt = {"prompt_token_ids": answer.prompt_ids if ids else None}
        return whole | more | prompt | {"service_tier": None, "system_fingerprint": FINGERPRINT}


class VllmDialect:
    """vLLM as released: completions, chat, tokenizer. `parses_calls`: it was started with a parser of calls."""

    name = "vllm"

    def __init__(self, *, parses_calls: bool = False) -> None:
        no_tools = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        self.endpoints: Mapping[str, Endpoint] = {
            "/v1/completions": Completions(),
            "/v1/chat/completions": Chats(
                self, token_ids=True, entries="all", no_tools="" if parses_calls else no_tools
            ),
        }

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        match method, path:
            case "GET", "/health" | "/ping":
                return ""
            case "GET", "/version":
                return {"version": VERSION}
            case "GET", "/v1/models":
                card = {"id": model.name, "object": "model", "created": 1_700_000_000, "owned_by": "vllm"}
                more: dict[str, Any] = {
                    "root": model.name,
                    "parent": None,
                    "max_model_len": model.context_length,
                    "permission": [],
                }
                return {"object": "list", "data": [card | more]}
            case "POST", "/tokenize":
                return self._tokenize(body, model)
        if path in self.endpoints:
            raise Refused(405, {"detail": "Method Not Allowed"})
        raise Refused(404, {"detail": "Not Found"})

    def error(self, status: int, message: str) -> JSON:
        return self.body(message, status)

    def unauthorized(self, status: int, key: str) -> JSON:
        return {"error": "Unauthorized"}

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        """Asked for more than fits behind the prompt, vLLM samples what fits."""
        if max_tokens > limit:
            text = f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}."
            return self.refused("max_tokens", max_tokens, f"{text} Please request fewer output tokens.")
        if prompt_tokens > limit:
            return self.full(prompt_tokens, limit)
        if prompt_tokens == limit or max_tokens < 1:
            return self.refused("max_tokens", 0, "max_tokens must be at least 1, got 0.")
        return None

    @staticmethod
    def full(prompt_tokens: int, limit: int) -> Refused:
        least = "at least " * (prompt_tokens == limit + 1)
        text = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{least}{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        return VllmDialect.refused("input_tokens", prompt_tokens, text)

    @staticmethod
    def refused(parameter: str, value: float, text: str) -> Refused:
        told = VllmDialect.body(f"{text} (parameter={parameter}, value={value})", 400, param=parameter)
        return Refused(400, told)

    @staticmethod
    def body(message: str, status: int, param: str | None = None) -> JSON:
        kinds = {404: "NotFoundError", 400: "BadRequestError", 429: "RateLimitError"}
        kind = kinds.get(status, "InternalServerError")
        return {"error": {"message": message, "type": kind, "param": param, "code": status}}

    @staticmethod
    def invalid(error: ValidationError) -> JSON:
        faults = [
            {
                "type": e["type"],
                "loc": ".".join(map(str, ("body", *e["loc"]))),
                "msg": e["msg"],
                "input": str(e["input"]),
            }
            for e in error.errors(include_url=False, include_context=False)
        ]
        return VllmDialect.faulty(faults)

    @staticmethod
    def faulty(faults: list[dict[str, str]]) -> JSON:
        told = f"{len(faults)} validation error{'s' * (len(faults) > 1)}:"
        message = "\n  ".join([told, *map(str, faults)])
        return {"error": {"message": message, "type": "Bad Request", "param": faults[0]["loc"], "code": 400}}

    @staticmethod
    def check_model(name: str | None, model: Model) -> None:
        if name is not None and name != model.name:
            raise Refused(
                404,
                VllmDialect.body(
                    f"The model `{name}` does not exist. Valid aliases: {model.name}.", 404, param="model"
                ),
            )

    def _tokenize(self, body: Mapping[str, Any], model: Model) -> JSON:
        known = {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"}
        if "prompt" not in body and "messages" not in body:
            missing = {"type": "missing", "msg": "Field required", "input": f"<dict of {len(body)} items>"}
            raise Refused(
                400, self.faulty([{"type": "missing", "loc": f"body.{name}"} | missing for name in _PROMPTS])
            )
        if set(body) - known or ("prompt" in body) == ("messages" in body):
            raise Refused(400, self.body(f"a request for /tokenize that has {sorted(body)}", 400))
        self.check_model(body.get("model"), model)
        text = body["prompt"] if "prompt" in body else model.render(as_messages(body["messages"]))
        # As for a model whose texts begin with a token.
        begins = [model.end_id] * bool(body.get("add_special_tokens", True))
        ids = begins + model.encode(text)
        return {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": None}
