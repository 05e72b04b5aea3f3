"""Checks, retries and joins the parts of one completion given as ids.

Who samples, an endpoint or a function, is left to subclasses; this module refuses answers that do not hold one
log-prob per sampled id. Sampled text is decoded from the ids here, never taken from the server: the token that
completes a stop string may hold more text.

A server that gets new weights may abort what it samples, and answer with the ids so far. These are kept, and the
completion is continued behind them by the next request, with a seed of its own: no id is sampled twice.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from orchestrator.completion.base import (
    RECORDED,
    CompletionRequest,
    Endpoint,
    Finish,
    Interrupted,
    Part,
    Refusal,
    UnusableSample,
    all_finite,
    fitted,
    ids_of,
)
from orchestrator.completion.finish import FinishReasons, end_of
from orchestrator.completion.line import visible_text
from orchestrator.completion.reasoning import LONGEST_TAG, opened_by
from orchestrator.completion.retry import (
    NONSENSE,
    Aborted,
    ForeignAnswer,
    Limiter,
    Retryable,
    RetryPolicy,
    SpoiltSample,
    with_retries,
)
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.versions import Attribution, told_spans
from orchestrator.errors import CompletionError, ContextLengthError
from orchestrator.rules.plan import derive_seed
from orchestrator.rules.policy import Policy, joined
from orchestrator.types import Completion, PolicySpan

UNTOLD = -1  # the prompt's length, where the server does not tell it
ROUNDING = 1e-6  # a log-prob above zero by less than this is a rounding error


@dataclass(frozen=True, slots=True)
class RawSample:
    """An answer as a dialect read it, before it is checked.

    `logprobs` None: there are none of the raw distribution. `prompt_ids`: the prompt as the server says it got it.
    `text`: the ids as the server decodes them, compared by the probe to see whether both sides have the same
    tokenizer. `ran_over`: the server dropped the beginning of a full context and sampled on. `sampled_tokens`:
    how many ids the server says it sampled. `policy_version`: of the last token; `weight_versions`: of each, as
    SGLang tells it; `spans`: the same, read already. What is wrong with versions costs no sample: then they are
    not known.
    """

    ids: list[Any]
    logprobs: list[Any] | None
    finish_reason: Any
    prompt_tokens: int
    prompt_ids: list[Any] | None = None
    policy_version: str | None = None
    text: str | None = None
    sampled_tokens: int | None = None
    weight_versions: Any = None
    spans: tuple[PolicySpan, ...] = ()
    ended: bool = False
    ran_over: bool = False


class IdCompletions(ABC):
    """Completions as ids. A subclass says how an endpoint, or a function, is asked for one answer.

    `seeded`: the same request with the same seed gets the same sample. `joins`: who samples may continue what was
    aborted itself, and then misses a stop string that was begun before.
    `context_length`: most tokens of prompt and completion together; None: not known.
    """

    takes_ids = True
    guides = False
    seeded = True
    joins = False
    context_length: int | None = None

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        tokenizer: HubTokenizer,
        retry: RetryPolicy | None = None,
        attribution: Attribution | None = None,
    ) -> None:
        self.name = name
        self.attribution = attribution or Attribution(Policy())
        self.endpoint = endpoint
        self._tokenizer = tokenizer
        self._retry = retry or RetryPolicy()
        self._limiter = Limiter()
        self._reasons = FinishReasons(endpoint.shown or name)

    @abstractmethod
    async def aclose(self) -> None:
        """Idempotent."""

    @abstractmethod
    async def _sampled(
        self, request: CompletionRequest, model: str, timeout_s: float, headers: Mapping[str, str] | None
    ) -> RawSample:
        """The answer to one request. Raises as `_continued`, and what reading nonsense raises."""

    async def _paused(self) -> bool:
        """Waits while sampling is paused. False: it is not, or nobody says so."""
        return False

    async def sample(self, request: CompletionRequest) -> Completion:
        request = fitted(request, self.context_length)
        parts = list(request.begun)
        try:
            completion, retries = await with_retries(
                lambda: self._continued(request, parts), self._retry, self.endpoint.timeout_s, self._limiter
            )
        except UnusableSample:
            raise
        except (CompletionError, ContextLengthError) as error:
            if not parts:
                raise
            raise Interrupted(error, self._completion(parts, "length", request), tuple(parts)) from error
        return replace(completion, retries=retries) if retries else completion

    async def _continued(self, request: CompletionRequest, parts: list[Part]) -> Completion:
        """One completion, behind `parts`, which keeps what can be continued. Raises Retryable, CompletionError,
        ContextLengthError."""
        while True:
            before = _ids(parts)
            try:
                sampled, part = await self._part(_rest(request, before), self.endpoint.timeout_s, None)
            except Retryable as error:
                if error.status is not None and await self._paused():
                    continue
                raise
            all_parts = [*parts, part]
            if sampled.ran_over:
                text = f"the context of the server is full, with {sampled.prompt_tokens} prompt tokens"
                full = ContextLengthError(text)
                raise Interrupted(full, self._completion(all_parts, "length", request), tuple(all_parts))
            reason = part.finish_reason or self._over((*before, *part.ids), request)
            if reason is not None:
                return self._completion(all_parts, reason, request)
            if part.ids and request.wishes.schema is not None:  # a form begins at the first token sampled
                raise Aborted("the server aborted it", sampled=True)
            if part.ids:
                parts.append(part)
            elif not await self._paused():
                raise Aborted("the server aborted it before its first token", sampled=False)

    async def _part(
        self, request: CompletionRequest, timeout_s: float, headers: Mapping[str, str] | None
    ) -> tuple[RawSample, Part]:
        """(the answer as it came, what is kept of it). Raises ForeignAnswer for an answer of another shape."""
        before = await self.attribution.before()
        model = before.served.model or self.endpoint.model
        try:
            sampled = await self._sampled(request, model, timeout_s, headers)
            ids, logprobs = checked(sampled, request)
            server_spans = sampled.spans or told_spans(sampled.weight_versions, len(ids))
            end = (
                None
                if end_of(sampled.finish_reason) == "aborted"
                else self._end(sampled.finish_reason, ids, request)
            )
        except NONSENSE as error:
            raise ForeignAnswer(f"not an answer in the dialect {self.name}: {type(error).__name__}") from error
        except Refusal as refusal:
            raise self.attribution.refused(before, refusal) from refusal
        server_end = bool(sampled.ended and ids) and self._tokenizer.learn_end(ids[-1])
        spans = await self.attribution.spans(before, len(ids), server_spans, sampled.policy_version)
        return sampled, Part(ids, logprobs, end, spans, server_end)

    def _end(self, reason: object, ids: tuple[int, ...], request: CompletionRequest) -> Finish:
        """Why the sample ended, by the server's word or, where that is not known, by its ids. Raises Retryable."""
        full = len(ids) >= request.sampling.max_tokens and self._over(ids, request) == "length"
        return self._reasons.end(reason, there=bool(ids), full=full)

    def _completion(self, parts: Sequence[Part], finish_reason: Finish, request: CompletionRequest) -> Completion:
        """What was sampled as one. Raises SpoiltSample, UnusableSample."""
        prompt, ids = request.prompt_ids or ids_of(), _ids(parts)
        aborted = len(parts) > 1 or parts[-1].finish_reason is None
        if (self.joins or aborted) and (end := self._stopped(ids, request.stop)) is not None:
            ids, finish_reason = ids[:end], "stop"
        count, broken = self._known(ids), finish_reason in ("broken_off", "out_of_time")
        opened = opened_by(self._tokenizer.decode(prompt[-LONGEST_TAG:].tolist()))
        text, visible, reasoning_chars = visible_text(self._tokenizer, ids[:count], request.stop, opened)
        spans = joined([span for part in parts for span in part.spans or _unknown(part)], count)
        completion = Completion(
            text=text,
            visible=visible,
            finish_reason=RECORDED[finish_reason],
            tokens_T=ids[:count],
            logprobs_T=_logprobs(parts, count),
            prompt_tokens=len(prompt),
            completion_tokens=max(1, len(ids)),
            reasoning_chars=reasoning_chars,
            server_end=parts[-1].server_end and count == sum(len(part.ids) for part in parts),
        ).sampled_from(spans)
        if count < len(ids) or not ids or broken:
            fault = (
                "an answer that the server broke off"
                if broken
                else f"an id outside the tokenizer's {self._tokenizer.size}"
                if ids
                else "an empty answer"
            )
            # Without a seed, another try would be another sample: a draw that a policy could earn.
            raise (SpoiltSample if self.seeded else UnusableSample)(fault, completion)
        if finish_reason == "content_filter":
            raise UnusableSample("a sample that the server filtered", completion)
        return completion

    def _over(self, ids: tuple[int, ...], request: CompletionRequest) -> Literal["stop", "length"] | None:
        """Why nothing is to be sampled behind the ids of an aborted completion; None: it is to be continued.
        SGLang looks for an abort before it looks for an end, so the last id may be one."""
        if self._known(ids) < len(ids):
            return "length"
        if ids and (self._tokenizer.stops(ids[-1]) or self._stopped(ids, request.stop) is not None):
            return "stop"
        return "length" if len(ids) >= request.sampling.max_tokens else None

    def _stopped(self, ids: tuple[int, ...], stop: tuple[str, ...]) -> int | None:
        """How many ids it takes until a stop string is there; None: there is none. A server that continues a
        completion looks for one in what it samples only: it misses one that was begun before."""

        def there(count: int) -> bool:
            text = self._tokenizer.decode(ids[:count])
            return any(string and string in text for string in stop)

        if not there(len(ids)):
            return None
        return bisect_left(range(len(ids)), True, key=there)

    def _known(self, ids: tuple[int, ...]) -> int:
        """How many ids come before the first one that the tokenizer does not have. A model may have more rows than
        its tokenizer has ids, and sample such a row: it has no text, and servers refuse it in a prompt."""
        if max(ids, default=0) < self._tokenizer.size:
            return len(ids)
        return next(place for place, token in enumerate(ids) if token >= self._tokenizer.size)


def _ids(parts: Sequence[Part]) -> tuple[int, ...]:
    if len(parts) == 1:  # nearly always: then nothing is copied
        return parts[0].ids
    return tuple(token for part in parts for token in part.ids)


def _logprobs(parts: Sequence[Part], count: int) -> tuple[float, ...] | None:
    """Of the first `known` ids; None if some part has none."""
    if len(parts) == 1:
        only = parts[0].logprobs
        return None if only is None else only[:count]
    values: list[float] = []
    for part in parts:
        if part.logprobs is None:
            return None
        values += part.logprobs
    return tuple(values[:count])


def _unknown(part: Part) -> tuple[PolicySpan, ...]:
    return (PolicySpan(len(part.ids), None, None),)


def _rest(request: CompletionRequest, before: tuple[int, ...]) -> CompletionRequest:
    """What is left to sample behind the ids that there are."""
    if not before:
        return request
    sampling = request.sampling
    seed = derive_seed(sampling.seed, "continued", 0, 0, len(before))
    return replace(
        request,
        prompt_ids=(request.prompt_ids or ids_of()) + ids_of(before),
        sampling=replace(sampling, max_tokens=sampling.max_tokens - len(before), seed=seed),
    )


def checked(sampled: RawSample, request: CompletionRequest) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """(ids, their log-probs if there are any). Raises Retryable."""
    prompt = request.prompt_ids or ids_of()
    ids = tuple(sampled.ids)
    # Whole lists are checked at a time: one by one, the checks were a fifth of a completion's cost here.
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        raise Retryable("the server returned a token id that is not a non-negative integer")
    if sampled.sampled_tokens not in (None, len(ids)):
        raise Retryable(f"{_number(sampled.sampled_tokens)} ids were sampled, {len(ids)} came")
    logprobs = None if sampled.logprobs is None else _checked_logprobs(sampled.logprobs, len(ids))
    if len(ids) > request.sampling.max_tokens:
        raise Retryable(f"{len(ids)} ids where {request.sampling.max_tokens} were asked for")
    if sampled.prompt_ids is not None and sampled.prompt_ids != prompt.tolist():
        raise Retryable("the server sampled from another prompt than it was given")
    if sampled.prompt_tokens not in (len(prompt), UNTOLD):
        theirs = _number(sampled.prompt_tokens)
        raise Retryable(f"the server saw {theirs} prompt ids, it was given {len(prompt)}")
    return ids, logprobs


def _checked_logprobs(values: list[Any], count: int) -> tuple[float, ...]:
    """Raises Retryable."""
    if len(values) != count:
        raise Retryable(f"{count} ids but {len(values)} log-probs")
    if not (kinds := set(map(type, values))) <= {int, float} or not all_finite(values):
        raise Retryable("the server returned a log-prob that is not a finite number")
    if (highest := max(values, default=0.0)) > ROUNDING:
        raise Retryable(f"a log-prob above zero ({highest})")
    logprobs = tuple(values if kinds == {float} else map(float, values))
    return tuple(min(0.0, value) for value in logprobs) if highest > 0.0 else logprobs


def _number(value: int | None) -> int:
    """The value, for an error message. Raises TypeError where it is no number."""
    if not isinstance(value, int):
        raise TypeError("not a number")
    return value
