"""The `/generate` of Atropos' example trainer and of its `vllm` server type.

`logprobs` is completions × tokens × `[{"<id>": log-prob}]`, so ids and log-probs come together, end
token and stop string included.
"""

from __future__ import annotations

from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.sampled import UNTOLD, Sampled
from orchestrator.completion.versions import version_text
from orchestrator.completion.vllm import sampling_params


class AtroposDialect:
    """vLLM's engine behind Atropos' own server. Takes what vLLM's SamplingParams takes."""

    name = "atropos"
    path = "/generate"
    streams = False
    tells_pauses = False
    seeded = True
    guides = False

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        return {"prompt": {"prompt_token_ids": request.prompt_ids or ()}, **sampling_params(request)}

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
