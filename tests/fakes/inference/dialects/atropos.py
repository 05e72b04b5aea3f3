"""The `/generate` of Atropos' example trainer: vLLM's engine behind a server of its own.

Its body becomes vLLM's SamplingParams; whatever that does not take, and whatever the engine refuses, is
a bare 500.
"""

from __future__ import annotations

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
    no_stream,
    stops,
)
from tests.fakes.inference.dialects.vllm import SAMPLING
from tests.fakes.inference.model import Model

INTERNAL = "Internal Server Error"


class SamplingParams(Strict):
    """vLLM's SamplingParams, what JSON can say of it."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(1.0, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = Field(16, ge=1)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None


class Generate:
    """`/generate`."""

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        rest = {name: value for name, value in body.items() if name not in ("prompt", "stream")}
        prompt = body.get("prompt")
        try:
            request = SamplingParams.model_validate(rest)
            if isinstance(prompt, dict):
                (ids,) = prompt.values()
                known = set(prompt) == {"prompt_token_ids"}
            else:
                ids, known = model.encode(prompt or ""), isinstance(prompt, str)
            if not known or not ids or not all(type(i) is int and 0 <= i < model.size for i in ids):
                raise ValueError("no prompt")
        except (ValidationError, ValueError, TypeError) as error:
            raise Refused(500, INTERNAL, str(error)) from error
        if request.n != 1 or body.get("stream"):
            raise Refused(500, INTERNAL, no_stream("Atropos server") + " and gives one completion")
        return Ask(
            request=request,
            prompt_ids=ids,
            messages=None,
            max_tokens=request.max_tokens,
            stop=stops(request.stop),
            seed=request.seed,
            left_to_default=left_to_default(request, SAMPLING),
            ignore_end=request.ignore_eos,
        )

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        request: SamplingParams = ask.request
        text = answer.text(
            model,
            stop_string=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens or not request.include_stop_str_in_output,
        )
        whole: dict[str, Any] = {
            "text": [] if answer.empty else [text],
            "prompt": model.decode(answer.prompt_ids),
            "finish_reasons": [] if answer.empty else [answer.finish],
        }
        if request.logprobs is not None and answer.logprobs is not None:
            entries = [[{str(i): p}] for i, p in zip(answer.ids, answer.logprobs, strict=False)]
            whole["logprobs"] = [] if answer.empty else [entries]
            whole["prompt_token_ids"] = answer.prompt_ids[: answer.prompt_tokens]
            whole["token_ids"] = [] if answer.empty else [answer.ids]
        return whole

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        raise NotImplementedError(no_stream("Atropos server"))


class AtroposDialect:
    """No model list, no chat."""

    name = "atropos"

    def __init__(self) -> None:
        self.endpoints: Mapping[str, Endpoint] = {"/generate": Generate()}

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        if method == "GET" and path in ("/health", "/health_generate"):
            return ""
        raise Refused(404, {"detail": "Not Found"})

    def error(self, status: int, message: str) -> JSON:
        return INTERNAL if status == 500 else {"detail": message}

    def unauthorized(self, status: int, key: str) -> JSON:
        return {"detail": "Unauthorized"}

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        # The engine raises, the server has no handler for it, and the client is not told why.
        return Refused(500, INTERNAL, "too long") if prompt_tokens >= limit else None
