"""llama.cpp: `/completion` with a list of ids, streamed.

Without streaming the server returns the ids of a stop string but drops their log-probs; streamed,
each event carries `tokens` and as many `completion_probabilities`. Log-probs are raw whatever the
temperature (`post_sampling_probs` off). Left unset it would sample with top_k 40, top_p 0.95 and
min_p 0.05, so every sampler is switched off by name.

Streamed, a token that ends within a UTF-8 character gets no event: neither its id nor its log-prob
is told, only `tokens_predicted` counts it. Such a completion is asked for once more in one piece,
with the same seed: that answer has all ids and becomes the sample; the log-probs it lacks (of those
tokens and of the stop string) are asked for one by one, with the ids before them as prompt. The one
token sampled there is a plain letter by force of `logit_bias`, which leaves raw log-probs as they are:
one that ends within a character, likely just there, would have none told at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.completion.base import CompletionRequest, Tokenizer, ids_of
from orchestrator.completion.ids import IdCompleter, Sampled
from orchestrator.completion.retry import Retryable


class LlamaCppDialect:
    """llama.cpp's own server, `xllamacpp` included."""

    name = "llamacpp"
    path = "/completion"
    streams = True

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "prompt": request.prompt_ids or (),
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
            sampled_tokens=last["tokens_predicted"],
        )


_TOP = (100, 10_000)  # how many of the likeliest tokens to ask for, until the one looked for is among them
_FORCED = 1e4  # added to a logit: nothing else is sampled
_CHARACTER = 8  # tokens before a place that can hold the beginning of its character


class LlamaCppCompleter(IdCompleter):
    """An `IdCompleter` that fetches what a streamed answer leaves out."""

    async def _sampled(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> Sampled:
        streamed = await super()._sampled(request, timeout_s, headers)
        if streamed.sampled_tokens == len(streamed.ids):
            return streamed
        body = {**self.dialect.body(request, self.endpoint.model), "stream": False}
        answer = await self._client.post(self.dialect.path, body, timeout_s=timeout_s, headers=headers)
        try:
            ids, told = list(answer["tokens"]), answer["completion_probabilities"]
            logprobs = _aligned(self._tokenizer, ids, told)
            whole = self.dialect.read([{**answer, "tokens": [], "completion_probabilities": []}])
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise Retryable(f"an answer that is none of llama.cpp: {type(error).__name__}") from error
        for place, value in enumerate(logprobs):
            if value is None:
                logprobs[place] = await self._logprob(request, ids, place, timeout_s)
        return replace(whole, ids=ids, logprobs=logprobs, text=None)

    async def _logprob(
        self, request: CompletionRequest, ids: Sequence[int], place: int, timeout_s: float
    ) -> float:
        """The raw log-prob of `ids[place]` behind what comes before it."""
        one = replace(
            request,
            prompt_ids=(request.prompt_ids or ids_of()) + ids_of(ids[:place]),
            stop=(),
            sampling=replace(request.sampling, max_tokens=1),
        )
        plain = {"stream": False, "logit_bias": [[self._tokenizer.encode("a")[-1], _FORCED]]}
        for top in (*_TOP, self._tokenizer.size):
            body = {**self.dialect.body(one, self.endpoint.model), **plain, "n_probs": top}
            answer = await self._client.post(self.dialect.path, body, timeout_s=timeout_s)
            try:
                for entry in answer["completion_probabilities"][0]["top_logprobs"]:
                    if entry["id"] == ids[place]:
                        return float(entry["logprob"])
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise Retryable("an answer without the likeliest tokens") from error
        raise Retryable(f"no log-prob for token {ids[place]}")


def _aligned(tokenizer: Tokenizer, ids: list[int], told: list[Any]) -> list[float | None]:
    """Log-probs by place. The server leaves out tokens that end within a character, and the stop string's."""
    logprobs: list[float | None] = [None] * len(ids)
    entries = iter(told)
    for place in range(len(ids)):
        if tokenizer.decode(ids[max(0, place + 1 - _CHARACTER) : place + 1]).endswith("\ufffd"):
            continue
        entry = next(entries, None)
        if entry is None:
            break
        if entry["id"] != ids[place]:
            raise ValueError("log-probs of other tokens")
        logprobs[place] = entry["logprob"]
    return logprobs
