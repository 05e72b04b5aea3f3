"""Completions of endpoints that take ids, over HTTP. A dialect says how a request looks and how an answer is read;
`sampled` checks and joins the answers."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.completion.base import PROBE_HEADER, CompletionRequest, answer_bytes, fitted, ids_of
from orchestrator.completion.http import MAX_BODY_BYTES, HttpClient
from orchestrator.completion.retry import Aborted, Retryable, RetryPolicy
from orchestrator.completion.sampled import IdCompletions, RawSample, checked
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.versions import Attribution, Question, told_spans, vllm_paused
from orchestrator.errors import CompletionError
from orchestrator.rules.backoff import Backoff
from orchestrator.types import Wishes

# No sampler but temperature and top_p, by the names vLLM, SGLang and Atropos share; every id and its own text.
UNFILTERED: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": False,
}
WHILE_PAUSED = Backoff(first_s=0.2, most_s=2.0)


class Dialect(ABC):
    """One server's way of taking ids and giving ids. `tells_pauses`: by `/is_paused`. `seeded`: the same seed
    gives the same sample. `guides`: it keeps to a `response_format`. `masks`: its log-probs are then of what the
    form left over, and those of the model are asked for afterwards (`scoring`, `scores`)."""

    name: str
    path: str
    streams = False
    tells_pauses = False
    seeded = True
    guides = False
    masks = False

    @abstractmethod
    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        """The JSON to post. Every sampling parameter is in it."""

    @abstractmethod
    def read(self, answer: Any) -> RawSample:
        """Ids and log-probs of an answer (of the list of events where it streams).

        Raises KeyError, TypeError, IndexError, ValueError for an answer of another shape.
        """

    def scoring(self, request: CompletionRequest, model: str, count: int) -> dict[str, Any]:
        """The JSON that asks for the log-probs of the last `count` ids of the prompt. It is called, as is
        `scores`, for dialects with `masks` alone."""
        raise NotImplementedError(self.name)

    def scores(self, answer: Any, ids: Sequence[int]) -> tuple[list[Any], str | None]:
        """(their log-probs, the weights' version if it is told). Raises as `read`, also for other ids."""
        raise NotImplementedError(self.name)


class WrongTokenizer(CompletionError):
    """The endpoint's model has another tokenizer than ours."""


class IdCompleter(IdCompletions):
    """Completions of one endpoint that takes ids, in one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        client: HttpClient,
        tokenizer: HubTokenizer,
        retry: RetryPolicy | None = None,
        attribution: Attribution | None = None,
    ) -> None:
        super().__init__(dialect.name, client.endpoint, tokenizer, retry, attribution)
        self.dialect = dialect
        self.guides = dialect.guides
        self.seeded = dialect.seeded
        self._client = client
        self._paused_now = Question(client, "/is_paused", vllm_paused) if dialect.tells_pauses else None
        self._pause: asyncio.Future[bool] | None = None  # the wait for the end of one

    async def aclose(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        await self._client.aclose()

    async def _paused(self) -> bool:
        """Waits while the server says that it is paused, once for all completions. False: it did not say so."""
        if self._paused_now is None:
            return False
        if self._pause is None or self._pause.done():
            self._pause = asyncio.ensure_future(self._pause_over(self._paused_now))
        return await asyncio.shield(self._pause)

    async def _pause_over(self, paused_now: Question[bool]) -> bool:
        paused = 0
        while await paused_now.now():
            paused += 1
            await asyncio.sleep(WHILE_PAUSED.pause_s(paused))
        return paused > 0

    async def probe(self, request: CompletionRequest, timeout_s: float) -> None:
        """One request before the first task. Raises WrongTokenizer, and as a completion without retries."""
        sampled, part = await self._part(request, timeout_s, PROBE_HEADER)
        if part.finish_reason is None:
            raise Aborted("the server aborted it", sampled=bool(part.ids))
        completion = self._completion([part], part.finish_reason, request)
        ids = completion.tokens_T or ()
        if not isinstance(sampled.text, str) or self._tokenizer.is_end(ids[-1]):
            return
        ours, theirs = completion.text.strip(), sampled.text.strip()
        if ours != theirs and "\ufffd" not in ours + theirs:
            raise WrongTokenizer(
                f"the endpoint decodes id {ids[0]} to {theirs[:40]!r}, the tokenizer to {ours[:40]!r}"
            )

    async def _sampled(
        self, request: CompletionRequest, model: str, timeout_s: float, headers: Mapping[str, str] | None
    ) -> RawSample:
        if not self.dialect.masks or request.wishes.schema is None:
            return self.dialect.read(await self._sent(request, model, timeout_s, headers))
        if self.context_length is not None:  # the sample is a prompt afterwards, with one token behind it
            request = fitted(request, self.context_length - 1)
        sampled = self.dialect.read(await self._sent(request, model, timeout_s, headers))
        ids, _ = checked(sampled, request)
        if not ids or self._known(ids) < len(ids):
            return replace(sampled, logprobs=None if ids else [])
        line = (request.prompt_ids or ids_of()) + ids_of(ids)
        asked = replace(
            request, prompt_ids=line, stop=(), wishes=Wishes(), sampling=replace(request.sampling, max_tokens=1)
        )
        answer = await self._sent(asked, model, timeout_s, headers, len(ids))
        logprobs, version = self.dialect.scores(answer, ids)
        versions = {span.oldest for span in told_spans(sampled.weight_versions, len(ids))} | {
            sampled.policy_version
        }
        if version is not None and versions - {None, version}:
            raise Retryable("the weights changed between a sample and its log-probs")
        return replace(sampled, logprobs=logprobs)

    async def _sent(
        self,
        request: CompletionRequest,
        model: str,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        scored: int = 0,
    ) -> Any:
        """The answer as it came. `scored`: log-probs of so many ids at the prompt's end are asked for."""
        send = self._client.stream if self.dialect.streams else self._client.post
        body = self.dialect.scoring(request, model, scored) if scored else self.dialect.body(request, model)
        if not self.endpoint.takes_n:
            body.pop("n", None)
        max_bytes = MAX_BODY_BYTES if scored else min(MAX_BODY_BYTES, answer_bytes(request))
        return await send(self.dialect.path, body, timeout_s=timeout_s, headers=headers, max_bytes=max_bytes)
