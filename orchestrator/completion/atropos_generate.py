"""The `/generate` of Atropos' example trainer and of its `vllm` server type.

`logprobs` is completions × tokens × `[{"<id>": log-prob}]`, so ids and log-probs come together, end
token and stop string included.
"""

from __future__ import annotations

from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.ids import UNFILTERED, UNTOLD, Sampled, version_text


class AtroposDialect:
    """vLLM's engine behind Atropos' own server. Takes what vLLM's SamplingParams takes."""

    name = "atropos"
    path = "/generate"
    streams = False

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "prompt": {"prompt_token_ids": request.prompt_ids or ()},
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

    def read(self, answer: Any) -> Sampled:
        ids: list[Any] = []
        logprobs: list[Any] = []
        for entry in answer["logprobs"][0]:
            ((token, logprob),) = (entry[0] if isinstance(entry, list) else entry).items()
            ids.append(int(token))
            logprobs.append(logprob)
        prompt_ids = answer.get("prompt_token_ids")
        return Sampled(
            ids=ids,
            logprobs=logprobs,
            finish_reason=answer["finish_reasons"][0],
            # Only newer servers return the prompt's ids; where they are, they are compared with ours.
            prompt_tokens=len(prompt_ids) if prompt_ids is not None else UNTOLD,
            prompt_ids=prompt_ids,
            policy_version=version_text(answer.get("weight_version")),
            sampled_tokens=len(answer["token_ids"][0]) if "token_ids" in answer else None,
        )
