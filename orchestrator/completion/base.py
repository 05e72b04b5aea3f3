"""What every inference endpoint offers here, and how text becomes ids."""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from orchestrator.completion.shape import Shape
from orchestrator.errors import CompletionError, ContextLengthError, FullContext
from orchestrator.rules.redact import redact
from orchestrator.rules.waits import aside
from orchestrator.types import (
    CallFormat,
    Completion,
    CompletionKind,
    Message,
    PolicySpan,
    Sampling,
    Split,
    Tools,
    Wishes,
)

TEXT_STATUSES = frozenset((400, 413, 422, 451))
PROBE_HEADER = {"x-orchestrator-probe": "1"}
# Services that are asked for their model list only before the first task: each token costs somebody money. Nothing
# else depends on these names.
_HOSTED = re.compile(
    r"(^|\.)(openai\.com|openai\.azure\.com|anthropic\.com|googleapis\.com|openrouter\.ai|together\.xyz"
    r"|together\.ai|mistral\.ai|deepseek\.com|groq\.com|fireworks\.ai|x\.ai|cohere\.com|perplexity\.ai)$"
)


_SECRET_CHARS = 6  # a shorter part of a header's value is found in any text
_ERROR_CHARS = 16_384  # how much of an error is looked at; a server may send megabytes
_BODY_BYTES, _BYTES_PER_TOKEN = 1 << 20, 4 << 10
LONG_CHARS = 16_384  # longer texts take milliseconds to encode, and are encoded in a thread
TOKEN_CHARS = 8  # more than a token of any prose or code has on average

Ids: TypeAlias = "array[int]"
Finish: TypeAlias = Literal["stop", "length", "content_filter", "broken_off", "out_of_time"]
# What is on record of each.
RECORDED: Mapping[Finish, Literal["stop", "length", "content_filter"]] = {
    "stop": "stop",
    "content_filter": "content_filter",
    **dict.fromkeys(("length", "broken_off", "out_of_time"), "length"),
}
Span: TypeAlias = tuple[int, int]  # characters of a text, from the first to behind the last


def ids_of(ids: Iterable[int] = ()) -> Ids:
    """Token ids as a compact array, which must not be changed.

    Garbage collection would visit every id of a tuple or list, of every rollout in flight, every few completions.
    Raises OverflowError, TypeError for what is no id.
    """
    return array("i", ids)


def all_finite(values: Sequence[float]) -> bool:
    """Whether each is a finite number. Nearly always their sum, which is quick, says so."""
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where completions come from. The key and the headers are in no repr and must be in no text."""

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)  # of the operator
    timeout_s: float = 1200.0
    chat_extras: Mapping[str, Any] = field(default_factory=dict)  # the operator's additions to chat requests
    takes_n: bool = True

    @property
    def shown(self) -> str:
        """Its address without credentials, for messages."""
        return redact(self.base_url)

    @property
    def hosted(self) -> bool:
        """Whether it is a public, paid service, which no probe samples from."""
        return _HOSTED.search(urlsplit(self.base_url).hostname or "") is not None

    def redact(self, text: str, most: int = 300) -> str:
        """`text` on one line, shortened, without keys, the headers' values, or anything that looks like a key."""
        words = text[:_ERROR_CHARS].split()
        if len(text) > _ERROR_CHARS:
            del words[-1:]  # it may be the beginning of a key
        text = " ".join(words)
        values = [part for value in self.headers.values() for part in (" ".join(value.split()), *value.split())]
        for secret in (self.api_key, *(value for value in values if len(value) >= _SECRET_CHARS)):
            text = text.replace(secret, "[key]") if secret else text
        text = re.sub(r"(?i)bearer\s+\S+", "Bearer [key]", text)
        return redact(text)[:most]


@dataclass(frozen=True, slots=True)
class Part:
    """What one request gave. `finish_reason` None: the server aborted it, and it can be continued."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: Finish | None
    spans: tuple[PolicySpan, ...]
    server_end: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion to sample. `prompt_ids` is set for endpoints that take ids, and is then sent as the prompt.

    `split` is for servers that keep evaluation and training apart. `begun`: what was sampled of it before, and is
    continued (`Interrupted`). `wishes`: what more a program asks for; with ids, its tools are in the prompt.
    `call_format`: how calls are written in the texts of `messages`; None: they hold none. `prompt_tokens`: of the
    prompt, if it goes out as text by the run's tokenizer; 0: unknown.
    """

    messages: tuple[Message, ...]
    prompt_ids: Ids | None
    stop: tuple[str, ...]
    sampling: Sampling
    rollout_id: str
    task_id: str
    index: int
    sequence: int
    split: Split = "train"
    begun: tuple[Part, ...] = ()
    wishes: Wishes = field(default_factory=Wishes)
    call_format: CallFormat | None = None
    prompt_tokens: int = 0


def fitted(request: CompletionRequest, context_length: int | None) -> CompletionRequest:
    """The request, for no more tokens than fit behind its prompt. `context_length`: of prompt and completion
    together; None: not known. Raises FullContext for a prompt of ids that leaves no room."""
    exact = request.prompt_ids is not None
    prompt = len(request.prompt_ids or ()) or request.prompt_tokens
    if context_length is None or request.sampling.max_tokens <= context_length - prompt:
        return request
    if exact and prompt >= context_length:
        raise FullContext(f"a prompt of {prompt} tokens for an endpoint that holds {context_length}")
    # Of a text the endpoint alone knows the length: what is counted here may be too much, and it may still fit.
    most = context_length - prompt if exact else max(1, context_length // 16, context_length - prompt)
    return replace(request, sampling=replace(request.sampling, max_tokens=most))


# Of vLLM, SGLang, OpenAI and those that word it like them.
_HOLDS = re.compile(r"(?:context length|context window|max_model_len)\D{0,12}(\d+)")
_PROMPT_HAS = re.compile(r"(\d+) (?:tokens )?(?:in|from) the (?:input )?(?:messages|prompt)|(\d+) input tokens")


def refitted(request: CompletionRequest, error: ContextLengthError) -> CompletionRequest | None:
    """The request for as many tokens as fit by the words of an endpoint that refused more; None: they name no
    room."""
    holds, has = _HOLDS.search(str(error)), _PROMPT_HAS.search(str(error))
    if holds is None or has is None:
        return None
    room = int(holds[1]) - int(has[1] or has[2])
    if not 0 < room < request.sampling.max_tokens:
        return None
    return replace(request, sampling=replace(request.sampling, max_tokens=room))


def answer_bytes(request: CompletionRequest) -> int:
    """How many bytes an honest answer with ids can have: each id with text and log-prob, and the prompt's ids."""
    return _BODY_BYTES + _BYTES_PER_TOKEN * request.sampling.max_tokens + 16 * len(request.prompt_ids or ())


class Refusal(CompletionError):
    """A 3xx or 4xx: a text or parameter that the endpoint does not take, a wrong path. `words`: more of what the
    endpoint said than the text has room for."""

    def __init__(self, text: str, status: int = 400, words: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.words = words or text

    @property
    def moved(self) -> bool:
        """Whether it is a redirect, which was not followed."""
        return 300 <= self.status < 400

    @property
    def of_text(self) -> bool:
        """Whether a text of the request may have caused it. No text causes another one: the same request may be
        served when it is sent again, by another server behind the same address."""
        return self.status in TEXT_STATUSES


class UnusableSample(CompletionError):
    """The endpoint sampled, and the sample cannot be used: it was filtered, has no text, or has ids that the
    tokenizer does not know. `completion`: what can be recorded of it; it counts at least one sampled token."""

    def __init__(self, text: str, completion: Completion) -> None:
        super().__init__(text)
        self.completion = completion


class Interrupted(UnusableSample):
    """The server aborted the completion, and did not continue it because of `cause`. `parts`: what was sampled;
    the same request goes on behind them if it has them as `begun`."""

    def __init__(
        self, cause: CompletionError | ContextLengthError, completion: Completion, parts: tuple[Part, ...]
    ) -> None:
        super().__init__(f"{cause}; {completion.completion_tokens} tokens were sampled before", completion)
        self.cause = cause
        self.parts = parts


class Completer(Protocol):
    """One kind of inference endpoint."""

    @property
    def takes_ids(self) -> bool:
        """Whether prompts go in as ids and sampled ids come back."""

    @property
    def guides(self) -> bool:
        """Whether it keeps to a `response_format`, with log-probs of the raw distribution."""

    async def sample(self, request: CompletionRequest) -> Completion:
        """One completion. Cancelling the call cancels it upstream.

        Raises CompletionError (after its own retries), UnusableSample, AuthenticationError, ContextLengthError;
        RecordError where a recording is asked for what it does not hold.
        """

    async def aclose(self) -> None:
        """Closes connections. Idempotent."""


class Tokenizer(Protocol):
    """Text to ids and back, and the model's chat template."""

    def encode(self, text: str, plain: Sequence[Span] = ()) -> list[int]:
        """Ids of `text`, nothing added. Control tokens are recognised outside the spans of `plain` only."""

    def spells_control(self, text: str) -> bool:
        """Whether `encode` would find a control token in it: one that is special, or named by the template."""

    def may_hold_control(self, text: str) -> bool:
        """Whether it may be a piece of a control token, if the chat template prints the other pieces around it."""

    def controls(self, text: str) -> list[int]:
        """What tells the control tokens that `encode` would find in it, in order."""

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of `ids`, special tokens included, no clean-up."""

    def is_end(self, token_id: int) -> bool:
        """Whether this id ends a turn or the text (a special token, never part of what a model says)."""

    def stops(self, token_id: int) -> bool:
        """Whether a server samples nothing behind this id."""

    def learn_end(self, token_id: int) -> bool:
        """The server says that this id ended a turn. Returns whether nothing but its word says so."""

    def said(self, ids: tuple[int, ...], text: str) -> str:
        """`text`, which is that of these sampled ids, without what ends their turn."""

    def behind_end(self, text: str, end: int) -> str:
        """The rest of what the template prints behind an assistant's text, where the turn was ended by a sampled
        `end` already: no turn has two ends."""

    def dated(self, at: float) -> Tokenizer:
        """The same with a chat template that takes this unix time for now."""

    @property
    def shape(self) -> Shape:
        """What the chat template prints as it is."""

    def call_opening(self, name: str | None) -> str:
        """How a completion begins that calls a tool: this one, or (None) any. Raises RecordError."""

    def last_end(self, text: str) -> int | None:
        """Where the token begins that ends the text's last turn; None: the text does not end with one."""

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of tools; None: its template prints no tools."""

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: Tools = ()) -> str:
        """The chat template's text."""


async def encoded(
    tokenizer: Tokenizer, text: str, limit: int, plain: Sequence[Span] = ()
) -> tuple[int, ...] | None:
    """Ids of `text`, encoded in a thread where that takes long. None: they are surely more than `limit`."""
    if len(text) <= LONG_CHARS and not plain:
        return tuple(tokenizer.encode(text))
    # The tokenizers' library lets others run, but what spells control tokens is cut into pieces here.
    return await (aside if plain else asyncio.to_thread)(_encoded, tokenizer, text, limit, plain)


def _encoded(tokenizer: Tokenizer, text: str, limit: int, plain: Sequence[Span]) -> tuple[int, ...] | None:
    """A text that is far too long is not encoded to its end: in pieces it has about as many ids as whole."""
    if len(text) > limit * TOKEN_CHARS and _counted(tokenizer.encode, (text,), limit) is None:
        return None
    return tuple(tokenizer.encode(text, plain))


def content_ids(tokenizer: Tokenizer, content: str) -> list[int]:
    """Ids of a message's content, or of a part of it; nothing in it is taken for a control token."""
    return tokenizer.encode(content, ((0, len(content)),) if tokenizer.spells_control(content) else ())


async def counted(tokenizer: Tokenizer, contents: Sequence[str], limit: int) -> int | None:
    """About how many ids these contents have, counted as `encoded` does. None: surely more than `limit`."""
    if sum(map(len, contents)) <= LONG_CHARS:
        return count(tokenizer, contents, limit)
    return await asyncio.to_thread(count, tokenizer, contents, limit)


def count(tokenizer: Tokenizer, contents: Sequence[str], limit: int) -> int | None:
    """As `counted`. Takes milliseconds for more than LONG_CHARS."""
    return _counted(partial(content_ids, tokenizer), contents, limit)


def _counted(encode: Callable[[str], list[int]], texts: Sequence[str], limit: int) -> int | None:
    count = 0
    for text in texts:
        for start in range(0, len(text), LONG_CHARS):
            count += len(encode(text[start : start + LONG_CHARS]))
            if count > 2 * limit:
                return None
    return count


def stop_strings(kind: CompletionKind, code_tags: tuple[str, str] | None) -> tuple[str, ...]:
    """smolagents' stop strings. The closing tag is left out if the opening tag contains it: it would stop too
    early."""
    if kind is CompletionKind.PLAN:
        return ("<end_plan>",)
    if kind is CompletionKind.FINAL:
        return ()
    opening, closing = code_tags or ("", "")
    return ("Observation:", "Calling tools:", *(() if closing in opening else (closing,)))
