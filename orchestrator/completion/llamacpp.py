"""llama.cpp: `/completion` with a list of ids, streamed.

Without streaming the server returns the ids of a stop string but drops their log-probs; streamed,
each event carries `tokens` and as many `completion_probabilities`. Log-probs are raw whatever the
temperature (`post_sampling_probs` off). Left unset it would sample with top_k 40, top_p 0.95 and
min_p 0.05, so every sampler is switched off by name.
"""

from __future__ import annotations

from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.ids import Sampled


class LlamaCppDialect:
    """llama.cpp's own server, `xllamacpp` included."""

    name = "llamacpp"
    path = "/completion"
    streams = True

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "prompt": list(request.prompt_ids or ()),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "typical_p": 1.0,
            "top_n_sigma": -1.0,
            "xtc_probability": 0.0,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "seed": sampling.seed,
            "stop": list(request.stop),
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            "n_probs": 1,
            "post_sampling_probs": False,
            "ignore_eos": False,
        }

    def read(self, answer: Any) -> Sampled:
        ids: list[Any] = []
        logprobs: list[Any] = []
        for event in answer:
            if "error" in event:
                raise ValueError("error event")
            ids += event.get("tokens") or []
            logprobs += [entry["logprob"] for entry in event.get("completion_probabilities") or []]
        last = answer[-1]
        if not last["stop"] or last.get("truncated"):
            raise ValueError("no end")
        return Sampled(
            ids=ids,
            logprobs=logprobs,
            finish_reason="length" if last["stop_type"] == "limit" else "stop",
            prompt_tokens=last["tokens_evaluated"],
            text="".join(event.get("content") or "" for event in answer),
        )
