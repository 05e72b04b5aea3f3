"""llama.cpp: `/completion` with a list of ids, streamed.

Without streaming the server returns the ids of a stop string but drops their log-probs; streamed,
each event carries `tokens` and as many `completion_probabilities`. Log-probs are raw whatever the
temperature (`post_sampling_probs` off). By default the server would sample with top_k 40, top_p 0.95 and
min_p 0.05, so every sampler is switched off by name.

Streamed, a token that ends within a UTF-8 character gets no event: neither its id nor its log-prob is
told, only `tokens_predicted` counts it. Such a completion is asked for again in one piece, with the same
seed. The second answer has all ids and becomes the sample, but has fewer log-probs. If both are the same
sample, the stream's counts tell which ids these belong to. Missing log-probs (of cut characters and of the
stop string) are looked up, many in a request: each place gives a prompt, the ids before it, and the answer
tells the likeliest tokens behind it. `logit_bias` makes the one token sampled there a plain letter and does
not change raw log-probs; a token that ends within a character, likely there, would come without any.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.completion.base import CompletionRequest, Part, Refusal, ids_of
from orchestrator.completion.ids import Dialect, IdCompleter
from orchestrator.completion.retry import NONSENSE, Retryable
from orchestrator.completion.sampled import RawSample
from orchestrator.completion.versions import Question, llamacpp_adapters
from orchestrator.errors import ContextLengthError
from orchestrator.types import PolicySpan

log = logging.getLogger(__name__)


class LlamaCppDialect(Dialect):
    """llama.cpp's own server, `xllamacpp` included."""

    name = "llamacpp"
    keeps_prompts = True  # in the server's cache, for the next turn
    path = "/completion"
    streams = True
    guides = True

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
            "cache_prompt": self.keeps_prompts,
            "return_tokens": True,
            "n_probs": 1,
            "post_sampling_probs": False,
            "ignore_eos": False,
            **({} if (schema := request.wishes.schema) is None else {"json_schema": schema}),
        }

    def read(self, answer: Any) -> RawSample:
        ids: list[Any] = []
        logprobs: list[Any] = []
        for event in answer:
            if "error" in event:
                raise ValueError("error event")
            ids += event.get("tokens") or []
            logprobs += [entry["logprob"] for entry in event.get("completion_probabilities") or []]
        last = answer[-1]
        full = bool(last.get("truncated"))
        if not last["stop"] and not full:
            raise ValueError("no end")
        return RawSample(
            ids=ids,
            # Where its context is full, an old server drops the beginning and samples on: of another prompt.
            logprobs=None if full else logprobs,
            finish_reason="length" if full or last["stop_type"] == "limit" else "stop",
            prompt_tokens=last["tokens_evaluated"],
            text="".join(event.get("content") or "" for event in answer),
            sampled_tokens=last["tokens_predicted"],
            ended=last["stop_type"] == "eos" and not full,
            ran_over=full,
        )


_TOP = (100, 10_000)  # how many of the likeliest tokens to ask for, in turn, until the wanted one is among them
_FORCED = 1e4  # added to a logit: nothing else is sampled
# Bounds on one look-up: other completions wait behind it, and its answer is held in memory.
_PLACES = 64
_PROMPT_IDS = 500_000
_TOLD = 400_000  # likely tokens in the answer, of some hundred bytes each


class LlamaCppCompleter(IdCompleter):
    """An `IdCompleter` that fetches what a streamed answer leaves out, and notices other adapters.

    A server whose adapters are changed while it runs goes on with what the old ones left in its cache: log-probs
    are then of neither policy. What was sampled across the change is sampled again, and the cache is not used any
    more. A server that does not tell its adapters any more may have changed them.
    """

    dialect: LlamaCppDialect

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adapters = Question(self._client, "/lora-adapters", llamacpp_adapters)
        self._used: str | None = None  # the adapters so far; None: not known, or the server has none

    async def _part(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> tuple[RawSample, Part]:
        if headers is not None:  # a probe: nothing else is asked before the first task
            return await super()._part(request, timeout_s, headers)
        before = await self._adapters.now()
        cached = self.dialect.keeps_prompts
        sampled, part = await super()._part(request, timeout_s, headers)
        after = await self._adapters.now()
        used, self._used = self._used or before, after
        if {used, before} != {after}:
            self.dialect.keeps_prompts = False
            log.warning(
                "the adapters of %s have changed: its cache of prompts holds the old ones, and is not used any "
                "more; a server that is started anew has it again",
                self.endpoint.shown,
            )
        elif cached == self.dialect.keeps_prompts:
            if after is not None and self.attribution.policy.served.version is None:
                part = replace(part, spans=(PolicySpan(len(part.ids), after, after),))
                self.attribution.policy.saw(after)
            return sampled, part
        raise Retryable("the server's adapters changed, and its cache is of the old ones", 0.0)

    async def _sampled(
        self, request: CompletionRequest, model: str, timeout_s: float, headers: Mapping[str, str] | None
    ) -> RawSample:
        events = await self._sent(request, model, timeout_s, headers)
        streamed = self.dialect.read(events)
        if streamed.ran_over and streamed.prompt_tokens < len(request.prompt_ids or ()):
            raise ContextLengthError(
                f"the server cut the prompt to {streamed.prompt_tokens} tokens: its context is full"
            )
        if streamed.sampled_tokens == len(streamed.ids):
            return streamed
        body = {**self.dialect.body(request, model), "stream": False}
        answer = await self._client.post(self.dialect.path, body, timeout_s=timeout_s, headers=headers)
        try:
            ids, entries = list(answer["tokens"]), answer["completion_probabilities"]
            logprobs = _aligned(ids, entries, _places(events))
            complete = self.dialect.read([{**answer, "tokens": [], "completion_probabilities": []}])
        except NONSENSE as error:
            raise Retryable(
                f"llama.cpp's answer lacks its token ids or log-probs: {type(error).__name__}"
            ) from error
        if complete.ran_over:
            return replace(complete, ids=ids, text=None)
        untold = [place for place, value in enumerate(logprobs) if value is None]
        for place, value in (await self._logprobs(request, ids, untold, timeout_s)).items():
            logprobs[place] = value
        return replace(complete, ids=ids, logprobs=logprobs, text=None)

    async def _logprobs(
        self, request: CompletionRequest, ids: Sequence[int], places: Sequence[int], timeout_s: float
    ) -> dict[int, float]:
        """The raw log-prob of each `ids[place]` behind what comes before it. Raises Retryable."""
        logprobs: dict[int, float] = {}
        longest = len(request.prompt_ids or ()) + len(ids)
        left = list(places)
        for top in (*_TOP, self._tokenizer.size):
            count = max(1, min(_PLACES, _PROMPT_IDS // longest, _TOLD // top))
            for start in range(0, len(left), count):
                some = left[start : start + count]
                try:
                    logprobs |= await self._looked_up(request, ids, some, top, timeout_s)
                except Refusal:  # then one prompt at a time
                    for place in some:
                        logprobs |= await self._looked_up(request, ids, [place], top, timeout_s)
            left = [place for place in left if place not in logprobs]
        if left:
            raise Retryable(f"no log-prob for token {ids[left[0]]}")
        return logprobs

    async def _looked_up(
        self, request: CompletionRequest, ids: Sequence[int], places: Sequence[int], top: int, timeout_s: float
    ) -> dict[int, float]:
        """Log-probs, by one request, of those places whose token is among the `top` likeliest ones."""
        single = replace(request, stop=(), sampling=replace(request.sampling, max_tokens=1))
        before = request.prompt_ids or ids_of()
        prompts = [before + ids_of(ids[:place]) for place in places]
        body = {
            **self.dialect.body(single, self.endpoint.model),
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "stream": False,
            "logit_bias": [[self._tokenizer.encode("a")[-1], _FORCED]],
            "n_probs": top,
            "response_fields": ["index", "completion_probabilities"],  # else each prompt comes back as text
        }
        answer = await self._client.post(self.dialect.path, body, timeout_s=timeout_s)
        logprobs: dict[int, float] = {}
        try:
            answers = answer if len(prompts) > 1 else [{**answer, "index": 0}]
            likeliest = {one["index"]: one["completion_probabilities"][0]["top_logprobs"] for one in answers}
            for number, place in enumerate(places):
                for entry in likeliest[number]:
                    if entry["id"] == ids[place]:
                        logprobs[place] = float(entry["logprob"])
                        break
        except NONSENSE as error:
            raise Retryable("an answer without the likeliest tokens") from error
        return logprobs


def _places(events: list[Any]) -> list[int]:
    """The places in the completion of the tokens that a stream told: one in each event but the last."""
    return [event["tokens_predicted"] - 1 for event in events if event["tokens"]]


def _aligned(ids: list[int], entries: list[Any], places: list[int]) -> list[float | None]:
    """Log-probs by place, None where unknown: all, if `told` is of another sample than the stream (`places`)."""
    logprobs: list[float | None] = [None] * len(ids)
    entries = list(zip(places, entries, strict=False))
    same = all(0 <= place < len(ids) and ids[place] == entry["id"] for place, entry in entries)
    if same and len(entries) <= len(places):
        for place, entry in entries:
            logprobs[place] = entry["logprob"]
    return logprobs
