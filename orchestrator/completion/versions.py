"""Which policy sampled a completion, and how servers are asked. A server that tells its version with each token is
believed; for the others it follows from what was served before and after."""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orchestrator.completion.base import PROBE_HEADER, Refusal
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import NONSENSE, Retryable
from orchestrator.errors import CompletionError, CompletionTimeout, ContextLengthError
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.policy import MOST_CHARS, Policy, Served
from orchestrator.rules.text import valid
from orchestrator.types import PolicySpan

log = logging.getLogger(__name__)
T = TypeVar("T")

ASK_S = 30.0  # for a server to answer a question: under load it is late
MOST_BYTES = 1 << 20  # of its answer
UNSET = "default"  # what vLLM and SGLang say until a trainer has named a version
MAX_SPANS = 1_000  # of one completion
MOST_MISSED = 3  # questions that a server which has never answered may leave unanswered
LEFT_ALONE = Backoff(
    first_s=60.0, most_s=3600.0
)  # and then between others: it may have been busy with new weights
NOT_FOUND = 404
NAMED_S = 1.0  # before a model that is not there by the trainer's name is asked for again


@dataclass(frozen=True, slots=True)
class Before:
    """What was known when a request was sent. `version`: the endpoint's own word."""

    served: Served
    version: str | None


class Question(Generic[T]):
    """What a server is asked about itself: `path`, and how its answer is read.

    Askers share answers: each gets one that was asked for after its own question.
    """

    def __init__(self, client: HttpClient, path: str, read: Callable[[Any], T | None]) -> None:
        self._client, self._path, self._read = client, path, read
        self._next: asyncio.Future[T | None] | None = None
        self._asking = asyncio.Lock()
        self._answered = False
        self._missed = 0  # questions before its first answer
        self._not_before = 0.0  # loop time

    async def now(self) -> T | None:
        """None: it does not say, or not now. Whoever does not know the question is not asked again."""
        if asyncio.get_running_loop().time() < self._not_before:
            return None
        if self._next is None:
            self._next = asyncio.ensure_future(self._answer())
        return await asyncio.shield(self._next)

    async def _answer(self) -> T | None:
        async with self._asking:  # until the one before is answered, others may join this one
            self._next = None
            try:
                answer = await self._client.get(
                    self._path, timeout_s=ASK_S, headers=PROBE_HEADER, max_bytes=MOST_BYTES
                )
                value = self._read(answer)
            except (CompletionError, ContextLengthError, *NONSENSE) as error:
                log.debug("%s%s: %s", self._client.endpoint.shown, self._path, error)
                self._miss(may_tell=isinstance(error, Retryable | CompletionTimeout))
                return None
            if value is None:
                self._miss(may_tell=False)
            else:
                self._answered = True
            return value

    def _miss(self, *, may_tell: bool) -> None:
        if self._answered:
            return
        self._missed += 1
        if not may_tell:
            self._not_before = math.inf
        elif (more := self._missed - MOST_MISSED) >= 0:
            self._not_before = asyncio.get_running_loop().time() + LEFT_ALONE.pause_s(more + 1)


class Attribution:
    """Finds the policies of one endpoint's completions. `asked` None: the server does not say its version when
    asked."""

    def __init__(self, policy: Policy, question: Question[str] | None = None) -> None:
        self.policy = policy
        self.question = question
        self._last: str | None = None  # the server's latest word

    async def before(self) -> Before:
        """To be called before each request. A trainer's name for the model is the one to ask for."""
        if self.question is not None and self.policy.served.model is None:
            self._last = await self.question.now()
        return Before(self.policy.served, self._last)

    def refused(self, before: Before, refusal: Refusal) -> CompletionError:
        """What the refusal of a request is. No text causes it where the trainer has given the model another name
        since, or is about to: then it is Retryable."""
        by_question, status = before.served.model, refusal.status
        if by_question != self.policy.served.model:
            return Retryable(f"{refusal}; the trainer has given the model another name since", 0.0, status)
        if by_question is not None and status == NOT_FOUND:
            return Retryable(str(refusal), NAMED_S, status)
        return refusal

    async def spans(
        self, before: Before, tokens: int, server_spans: Sequence[PolicySpan], version: str | None
    ) -> tuple[PolicySpan, ...]:
        """The policies of so many tokens. `told`: the server's word of each; `version`: its word of the last one.

        Empty: nothing is known.
        """
        spans = await self._found(before, tokens, server_spans, version)
        self.policy.saw_all(spans)
        return spans

    async def _found(
        self, before: Before, tokens: int, server_spans: Sequence[PolicySpan], version: str | None
    ) -> tuple[PolicySpan, ...]:
        if before.served.model is not None:
            return self._trainers(before, tokens)
        if self._counts(*(version for span in server_spans for version in (span.oldest, span.newest))):
            self._last = server_spans[-1].newest or self._last
            return tuple(server_spans)
        by_question = version is None and self.question is not None
        if version is None and self.question is not None:
            version = self._last = await self.question.now()
        if not self._counts(version, before.version if by_question else None):
            return self._trainers(before, tokens)
        if by_question:
            return _span(tokens, _named(before.version, before.served), _named(version, self.policy.served))
        # A server that is not asked tells nothing before its first answer.
        oldest, self._last = before.version, version
        return _span(tokens, version if oldest is None else _named(oldest, before.served), version)

    def _counts(self, *versions: str | None) -> bool:
        """Whether the server says something. What nobody has told it is nothing beside a trainer's word."""
        nothing = {None} if self.policy.served.version is None else {None, UNSET}
        return not nothing.issuperset(versions)

    def _trainers(self, before: Before, tokens: int) -> tuple[PolicySpan, ...]:
        """By the trainer's word. What it serves by another name since cannot have answered."""
        now, then = self.policy.served, before.served
        return _span(tokens, then.version, now.version if now.model == then.model else then.version)


def _named(version: str | None, served: Served) -> str | None:
    """The server's version; the trainer's where nobody has told it to the server."""
    return served.version or version if version == UNSET else version


def _span(tokens: int, oldest: str | None, newest: str | None) -> tuple[PolicySpan, ...]:
    return () if oldest is None and newest is None else (PolicySpan(tokens, oldest, newest),)


def version_text(value: Any) -> str | None:
    """A policy version as the server tells it, cut to MOST_CHARS; None: it tells none, or something that is
    neither text nor a number."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    return valid(str(value)[:MOST_CHARS]) or None


def told_spans(value: Any, tokens: int) -> tuple[PolicySpan, ...]:
    """SGLang's `weight_versions`: `{version, start, end}`, places in the completion. Empty: there are none, or
    none that cover the completion."""
    if not isinstance(value, list) or len(value) > MAX_SPANS:
        return ()
    spans, at = [], 0
    for entry in value:
        match entry:
            case {"version": version, "start": int(start), "end": int(end)} if start == at <= end:
                spans.append(PolicySpan(end - start, version_text(version), version_text(version)))
                at = end
            case _:
                return ()
    return tuple(spans) if at == tokens else ()


def vllm_version(answer: Any) -> str | None:
    """Of vLLM's `/weight_info` (a server in its development mode has it)."""
    return version_text(answer["weight_version"])


def llamacpp_adapters(answer: Any) -> str | None:
    """Of llama.cpp's `/lora-adapters`: which are in use, and how much. None: the server has no adapter. Others are
    another text, also where it is cut: a change that goes unnoticed spoils log-probs.

    One adapter in full use is its path without `.gguf`: versions that end in numbers can be counted.
    """
    loaded = sorted((str(one["path"]), float(one["scale"])) for one in answer)
    if not loaded:
        return None
    match [(path, scale) for path, scale in loaded if scale]:
        case [(path, 1.0)]:
            used = path.removesuffix(".gguf")
        case several:
            used = json.dumps([f"{path} x {scale}" for path, scale in several])
    if len(used) <= MOST_CHARS:
        return used
    digest = hashlib.blake2b(used.encode(), digest_size=16).hexdigest()
    return f"{used[: MOST_CHARS - len(digest) - 1]} {digest}"


def vllm_paused(answer: Any) -> bool:
    """Of vLLM's `/is_paused`, likewise: whether it samples nothing for now, as for new weights."""
    return answer["is_paused"] is True
