"""SGLang: `/generate` with `input_ids`, after GenerateReqInput and SamplingParams.

Real servers ignore unknown fields of the request, which this one refuses. On unknown sampling parameters
they fail with a bare 500, and so does this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
from tests.fakes.inference.model import Model, logprob

SAMPLING = frozenset(
    [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "n",
        "ignore_eos",
        "min_new_tokens",
    ]
)


class SamplingParams(Strict):
    """SGLang's SamplingParams, what callers may set."""

    max_new_tokens: int | None = Field(128, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = Field(1.0, ge=0)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(-1, ge=-1)
    min_p: float | None = Field(0.0, ge=0, le=1)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(1.0, gt=0, le=2)
    min_new_tokens: int | None = Field(0, ge=0)
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None


class GenerateRequest(Strict):
    """SGLang's GenerateReqInput for text, one prompt."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    log_metrics: bool = True
    return_hidden_states: bool = False
    lora_path: str | None = None
    priority: int | None = None
    extra_key: str | None = None


class Generate:
    """`/generate`. `seeded` False: a server from before `sampling_seed`."""

    def __init__(self, *, seeded: bool) -> None:
        self._seeded = seeded

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        try:
            request = GenerateRequest.model_validate(body)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            message = f"{error.error_count()} validation errors: {faults}"
            body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
            raise Refused(400, body) from error
        if (request.text is None) == (request.input_ids is None):
            raise self._refused("Either text, input_ids or input_embeds should be provided.")
        sampling = self._sampling(request.sampling_params or {})
        if sampling.json_schema is not None:
            json.loads(sampling.json_schema)
        if request.stream or sampling.n not in (None, 1):
            raise self._refused("this scripted SGLang gives one completion, in one piece")
        ids = request.input_ids if request.input_ids is not None else model.encode(request.text or "")
        if not ids or max(ids) >= model.size or min(ids) < 0:
            raise self._refused(f"The input_ids {ids[:3]}… contain values outside the vocab size ({model.size}).")
        return Ask(
            request=(request, sampling),
            prompt_ids=ids,
            messages=None,
            max_tokens=sampling.max_new_tokens,
            stop=stops(sampling.stop),
            seed=sampling.sampling_seed,
            left_to_default=left_to_default(sampling, SAMPLING | ({"sampling_seed"} if self._seeded else set())),
            ignore_end=bool(sampling.ignore_eos),
        )

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        request, sampling = ask.request
        if sampling.no_stop_trim and not answer.text_null:
            # Nothing is trimmed: what a token carries beyond the stop string is there too.
            text: str | None = model.decode(
                [i for i in answer.ids if i < model.size], skip_special=bool(sampling.skip_special_tokens)
            )
        else:
            text = answer.text(model, stop_string=False, skip_special=True)
        reason: dict[str, Any] = {"type": answer.finish}
        reason |= {"length": ask.max_tokens} if answer.finish == "length" else {"matched": answer.stopped_by}
        meta: dict[str, Any] = {
            "id": f"{answer.number:032x}",
            "finish_reason": reason,
            "prompt_tokens": answer.prompt_tokens,
            "weight_version": answer.last_version if answer.signed else model.weight_version,
        }
        if answer.versions is not None:
            meta["weight_versions"] = answer.version_spans()
        if request.return_logprob and answer.logprobs is not None:
            names = [model.decode([i]) if request.return_text_in_logprobs else None for i in answer.ids]
            logprobs = masked(answer.logprobs) if sampling.json_schema else answer.logprobs
            entries = [list(entry) for entry in zip(logprobs, answer.ids, names, strict=False)]
            begin = len(ask.prompt_ids) if request.logprob_start_len in (None, -1) else request.logprob_start_len
            # The first place asked for is behind nothing that was looked at.
            told = [
                [logprob(token, place) if place > begin else None, token, None]
                for place, token in enumerate(ask.prompt_ids)
                if place >= begin
            ]
            meta |= {"input_token_logprobs": told, "output_token_logprobs": [] if answer.empty else entries}
        meta |= {
            "completion_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached,
            "e2e_latency": 0.01,
        }
        ids = [] if answer.empty else answer.ids
        return {"text": "" if answer.empty else text, "output_ids": ids, "meta_info": meta}

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        raise NotImplementedError(no_stream("SGLang"))

    def _sampling(self, raw: Mapping[str, Any]) -> SamplingParams:
        known = set(SamplingParams.model_fields) - (set() if self._seeded else {"sampling_seed"})
        for name in raw:
            if name not in known:
                reason = f"SamplingParams.__init__() got an unexpected keyword argument '{name}'"
                raise Refused(500, "Internal Server Error", reason)
        try:
            return SamplingParams.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._refused(f"{first['loc'][0]}: {first['msg']}, got {first['input']}.") from error

    def _refused(self, message: str) -> Refused:
        return Refused(400, {"error": {"message": message}})


class SglangDialect:
    """SGLang's server: its own endpoint and chat."""

    name = "sglang"

    def __init__(self, *, seeded: bool = True) -> None:
        self.endpoints: Mapping[str, Endpoint] = {
            "/generate": Generate(seeded=seeded),
            "/v1/chat/completions": ChatCompletions(self, entries="all"),
        }

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        match method, path:
            case "GET", "/health" | "/health_generate":
                return ""
            case "GET", "/get_model_info" | "/model_info":
                info = {"model_path": model.name, "tokenizer_path": model.name, "is_generation": True}
                return info | {"preferred_sampling_params": None, "weight_version": model.weight_version}
            case "GET", "/get_server_info" | "/server_info":
                limits = {"context_length": model.context_length, "max_total_num_tokens": 1_000_000}
                return {"model_path": model.name, "version": "0.5.4", **limits, "internal_states": [{}]}
            case "GET", "/v1/models":
                card = {"id": model.name, "object": "model", "created": 1_700_000_000, "owned_by": "sglang"}
                return {
                    "object": "list",
                    "data": [card | {"root": model.name, "max_model_len": model.context_length}],
                }
        raise Refused(404, {"detail": "Not Found"})

    def error(self, status: int, message: str) -> JSON:
        return {"error": {"message": message}}

    def unauthorized(self, status: int, key: str) -> JSON:
        return {"error": "Unauthorized"}

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        if prompt_tokens >= limit:
            message = (
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
            )
        elif prompt_tokens + max_tokens > limit:
            message = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You "
                f"requested a total of {prompt_tokens + max_tokens} tokens: {prompt_tokens} tokens from the input "
                f"messages and {max_tokens} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit."
            )
        else:
            return None
        return Refused(400, self.error(400, message))
