"""Stock vLLM: `/v1/completions` with a list of ids as prompt and `return_token_ids`.

`token_ids` holds every sampled id, end token and stop string included; `logprobs: 0` adds the
sampled id's own log-prob to each, raw by default (`--logprobs-mode raw_logprobs`). Of a sample that is kept to a
schema they are of what the schema left over: the grammar's bitmask is applied before the sampler takes log-probs
(GPUModelRunner.sample_tokens). `prompt_logprobs` are the model's.
"""

from collections.abc import Sequence
from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.ids import UNFILTERED, Dialect
from orchestrator.completion.sampled import UNTOLD, RawSample
from orchestrator.completion.versions import version_text


def sampling_params(request: CompletionRequest) -> dict[str, Any]:
    """vLLM's SamplingParams, every one of them."""
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **UNFILTERED,
        "seed": sampling.seed,
        "stop": list(request.stop),
        "min_tokens": 0,
        "logprobs": 0,
        "include_stop_str_in_output": True,
    }


class VllmDialect(Dialect):
    """vLLM's OpenAI server, as released."""

    name = "vllm"
    path = "/v1/completions"
    tells_pauses = True
    guides = True
    masks = True

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": request.prompt_ids or (),
            **sampling_params(request),
            "stream": False,
            "echo": False,
            "return_token_ids": True,
            "add_special_tokens": False,
            "spaces_between_special_tokens": False,
            **({"response_format": request.wishes.response_format} if request.wishes.response_format else {}),
        }

    def scoring(self, request: CompletionRequest, model: str, count: int) -> dict[str, Any]:
        return {**self.body(request, model), "prompt_logprobs": 0}

    def scores(self, answer: Any, ids: Sequence[int]) -> tuple[list[Any], str | None]:
        entries = answer["choices"][0]["prompt_logprobs"][-len(ids) :]
        logprobs = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids, strict=True)]
        return logprobs, version_text(answer.get("weight_version"))

    def read(self, answer: Any) -> RawSample:
        choice = answer["choices"][0]
        return RawSample(
            ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            finish_reason=choice["finish_reason"],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            prompt_ids=choice.get("prompt_token_ids"),
            policy_version=version_text(answer.get("weight_version")),
            text=choice.get("text"),
            sampled_tokens=answer["usage"]["completion_tokens"],
            # The string or the id that stopped it; null: the model's own end of text.
            ended=choice["finish_reason"] == "stop" and not isinstance(choice.get("stop_reason", ""), str),
        )


class AtroposDialect(Dialect):
    """vLLM's engine behind the `/generate` of Atropos' example trainer and of its `vllm` server type. Takes what
    vLLM's SamplingParams takes. `logprobs` is completions x tokens x `[{"<id>": log-prob}]`, end token and stop
    string included."""

    name = "atropos"
    path = "/generate"

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        return {"prompt": {"prompt_token_ids": request.prompt_ids or ()}, **sampling_params(request)}

    def read(self, answer: Any) -> RawSample:
        ids: list[Any] = []
        logprobs: list[Any] = []
        for entry in answer["logprobs"][0]:
            ((token, logprob),) = (entry[0] if isinstance(entry, list) else entry).items()
            ids.append(int(token))
            logprobs.append(logprob)
        prompt_ids = answer.get("prompt_token_ids")
        return RawSample(
            ids=ids,
            logprobs=logprobs,
            finish_reason=answer["finish_reasons"][0],
            # Only newer servers return the prompt's ids; where they are, they are compared with ours.
            prompt_tokens=len(prompt_ids) if prompt_ids is not None else UNTOLD,
            prompt_ids=prompt_ids,
            policy_version=version_text(answer.get("weight_version")),
            sampled_tokens=len(answer["token_ids"][0]) if "token_ids" in answer else None,
        )
