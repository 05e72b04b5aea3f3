"""The chat dialect: `/chat/completions` of any OpenAI-compatible endpoint.

Text in, text out. Ids and log-probs are recorded where the endpoint gives them (vLLM's
`return_token_ids`, llama.cpp's `id` in log-prob entries), but a chat prompt is rendered anew by the
server each turn, so the data made from it are `retokenized`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.calls.structured import structured
from orchestrator.calls.written import written
from orchestrator.completion.base import PROBE_HEADER, CompletionRequest, Refusal, UnusableSample, fitted
from orchestrator.completion.http import HttpClient
from orchestrator.completion.line import cut_at_stop
from orchestrator.completion.reasoning import reasoning_chars, tagged
from orchestrator.completion.retry import NONSENSE, Limiter, Retryable, RetryPolicy, with_retries
from orchestrator.completion.sampled import finished_by
from orchestrator.completion.startup import Startup
from orchestrator.completion.versions import Attribution, version_text
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.policy import Policy
from orchestrator.text import MAX_JSON_INTEGER, valid
from orchestrator.types import Call, CallFormat, Completion, Message, Sampling, Tools, Wishes

log = logging.getLogger(__name__)

# Parameters of servers other than OpenAI's, sent so that none of their defaults applies.
_EXTRAS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0, "return_token_ids": True}
# Parameters that are left out when an endpoint refuses them by name. Temperature is not among them.
_OPTIONAL = (*_EXTRAS, "seed", "logprobs", "presence_penalty", "frequency_penalty", "n")
_REASONING = ("reasoning_content", "reasoning")  # fields for reasoning that is sent apart from the answer
_TRIAL = (Message("user", "1+1="),)
_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    },
)
PROBES = 2
PROBE_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 32 << 20
MAX_TOKEN_CHARS = 1024  # no token is longer: the longest ones are of 128 and more spaces
MAX_TEMPLATE_TOKENS = 100_000  # that a server may put around a conversation: a system prompt of its own, tools


class ChatCompleter:
    """Chat completions of one endpoint."""

    takes_ids = False
    guides = True  # the endpoint does, or refuses
    context_length: int | None = None  # most tokens of prompt and completion together; None: not known

    def __init__(
        self,
        client: HttpClient,
        retry: RetryPolicy | None = None,
        attribution: Attribution | None = None,
        *,
        why: str = "",
    ) -> None:
        """`why`: the reason for asking for text."""
        self._attribution = attribution or Attribution(Policy())
        self.endpoint = client.endpoint
        self.why = why
        self._client = client
        self._retry = retry or RetryPolicy()
        self._limiter = Limiter()
        self._left_out: set[str] = set(_EXTRAS) if self.endpoint.hosted else set()
        self._max_tokens_name = "max_tokens"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sampling parameters that this endpoint does not know and does not get."""
        return tuple(sorted(self._left_out))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def probe(self, startup: Startup, requests: int = PROBES) -> None:
        """Raises EnvironmentUnusable unless the endpoint takes the key, knows the model and serves.

        Asks for at most `requests` completions of one token each, those not counted that `startup` asks for again;
        refused parameters are left out from then on.
        """
        url = self.endpoint.shown
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1, seed=1)
        request = CompletionRequest(_TRIAL, None, (), sampling, "probe", "probe", 0, 0)

        async def asked() -> Completion:
            call = partial(self._call, request, PROBE_TIMEOUT_S, headers=PROBE_HEADER, refuse_all_extras=True)
            return await startup.sample(call)

        for left in reversed(range(requests)):
            try:
                await startup.answered(asked)
            except AuthenticationError as error:
                raise EnvironmentUnusable(str(error)) from error
            except _ParameterRefused:
                continue
            except UnusableSample as error:  # a model that thinks first gives no text in one token
                log.debug("the probe of %s: %s", url, error)
                return
            except Retryable as error:
                if left == 0:
                    raise EnvironmentUnusable(f"the endpoint {url} does not serve: {error}") from error
            except (CompletionError, ContextLengthError) as error:
                raise EnvironmentUnusable(f"the endpoint {url} refuses completions: {error}") from error
            else:
                return

    async def probe_tools(self, startup: Startup, calls: CallFormat) -> None:
        """Raises EnvironmentUnusable where the endpoint serves, but refuses tools."""
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1, seed=1)
        request = CompletionRequest(
            _TRIAL, None, (), sampling, "probe", "probe", 0, 0, wishes=Wishes(tools=_TOOLS), call_format=calls
        )
        if not startup.samples_left:
            return
        try:
            await startup.answered(
                lambda: startup.sample(lambda: self._call(request, PROBE_TIMEOUT_S, headers=PROBE_HEADER))
            )
        except Refusal as refusal:
            raise EnvironmentUnusable(
                f"the endpoint {self.endpoint.shown} refuses tools ({refusal}); start it with a parser of calls "
                "(vLLM: --enable-auto-tool-choice --tool-call-parser NAME), or set --env.tool_call_format json"
            ) from refusal
        except (
            CompletionError,
            ContextLengthError,
            _ParameterRefused,
        ) as error:  # it serves, all the same
            log.debug("the probe of %s with tools: %s", self.endpoint.shown, error)

    async def sample(self, request: CompletionRequest) -> Completion:
        request = fitted(request, self.context_length)

        async def call() -> Completion:
            while True:
                try:
                    return await self._call(request, self.endpoint.timeout_s)
                except _ParameterRefused as refused:  # each refusal leaves fewer parameters, so the loop ends
                    log.warning("%s does not know %s: left out", self.endpoint.shown, refused.names)

        completion, retries = await with_retries(call, self._retry, self.endpoint.timeout_s, self._limiter)
        return replace(completion, retries=retries) if retries else completion

    async def _call(
        self,
        request: CompletionRequest,
        timeout_s: float,
        *,
        headers: dict[str, str] | None = None,
        refuse_all_extras: bool = False,
    ) -> Completion:
        before = await self._attribution.before()
        try:
            answer = await self._client.post(
                f"{self._client.openai}/chat/completions",
                self._body(request, before.served.model or self.endpoint.model),
                timeout_s=timeout_s,
                headers=headers,
                max_bytes=MAX_BODY_BYTES,
            )
        except Refusal as error:
            refused = self._parameter_refused(error, request, refuse_all_extras)
            raise refused or self._attribution.refused(before, error) from error
        try:
            completion, fault = self._completion(answer, request)
            count = completion.sampled_tokens
            spans = await self._attribution.spans(before, count, (), completion.policy_version)
        except NONSENSE as error:
            raise Retryable(f"an answer that is no chat completion: {type(error).__name__}") from error
        completion = completion.sampled_from(spans)
        if fault:  # no retry: an endpoint may not know seeds, and a retry would then give another sample
            raise UnusableSample(fault, completion)
        return completion

    def _body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": model,
            self._max_tokens_name: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1 if self.endpoint.takes_n else None,
            "seed": sampling.seed,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": True,
            "stop": list(request.stop) or None,
            **_EXTRAS,
        }
        body = {k: v for k, v in body.items() if k not in self._left_out and v is not None}
        wishes = request.wishes
        messages = structured(request.messages, wishes.tools, request.call_format, for_api=True)
        return {**body, **_wished(wishes), **self.endpoint.chat_extras, "messages": messages}

    def _parameter_refused(
        self, refusal: Refusal, request: CompletionRequest, refuse_all_extras: bool
    ) -> _ParameterRefused | None:
        """Leaves out from now on what the refusal names; None: nothing that can be left out."""
        text = str(refusal)
        if refusal.status not in (400, 422):
            return None

        wishes = request.wishes
        talk = structured(request.messages, wishes.tools, request.call_format)
        asked = list(_texts([talk, wishes.tools, wishes.tool_name, wishes.response_format, request.stop]))

        def names(name: str) -> bool:
            """A word of the request does not count: the refusal may quote what the model, or code of it, wrote on
            purpose."""
            word = re.compile(rf"\b{name}\b")
            return bool(word.search(text)) and not any(map(word.search, asked))

        if names("max_completion_tokens") and self._max_tokens_name == "max_tokens":
            self._max_tokens_name = "max_completion_tokens"
            return _ParameterRefused(("max_tokens",))
        named = {name for name in _OPTIONAL if names(name) and name not in self._left_out}
        if not named and refuse_all_extras:
            named = set(_EXTRAS) - self._left_out
        if not named:
            return None
        self._left_out |= named
        return _ParameterRefused(tuple(sorted(named)))

    def _completion(self, answer: Any, request: CompletionRequest) -> tuple[Completion, str]:
        """(the answer, checked; why it cannot be used, or nothing). Raises Retryable."""
        choices = answer["choices"]
        if not isinstance(choices, list) or not choices:
            raise Retryable("an answer without choices")
        choice = choices[0]
        said, reasoning = choice["message"].get("content"), _reasoning(choice["message"])
        if not isinstance(said, str | None):
            raise Retryable("an answer whose text is none")
        if request.wishes.tools and (calls := _calls(choice["message"])):
            said = written(said or "", calls, request.call_format or "hermes")
        text = valid(reasoning + (said or ""))  # a server may cut a character in two
        # Where the server sent reasoning apart from the answer, no part of the answer is reasoning.
        thought = len(valid(reasoning)) if reasoning else reasoning_chars(text, None)
        reason = choice.get("finish_reason")
        finish_reason = finished_by("stop" if reason == "tool_calls" and request.wishes.tools else reason)
        tokens, logprobs = _ids_and_logprobs(choice)
        usage = answer.get("usage") or {}
        most, asked = request.sampling.max_tokens, sum(len(m.content) for m in request.messages)
        if len(text) > most * MAX_TOKEN_CHARS:
            raise Retryable(f"{len(text)} characters where {most} tokens were asked for")
        # Budgets count these numbers: an impossible one must not end a rollout.
        sampled = min(most, _count(usage, "completion_tokens") or len(tokens or logprobs or ()) or int(text != ""))
        prompt = _count(usage, "prompt_tokens")
        completion = Completion(
            text=text,
            visible=cut_at_stop(text[thought:], request.stop),
            finish_reason=finish_reason,
            tokens_T=tokens,
            logprobs_T=logprobs,
            prompt_tokens=prompt if prompt <= 4 * asked + MAX_TEMPLATE_TOKENS else 0,
            completion_tokens=max(1, sampled),
            policy_version=_version(answer),
            reasoning_chars=thought,
        )
        if finish_reason == "content_filter":
            return completion, f"a sample that ended by {str(reason)[:40]!r}"
        empty = (said is None and not reasoning) or not sampled
        return completion, "a sample without text" if empty else ""


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


class _ParameterRefused(Exception):
    """The endpoint does not know these parameters. From now on they are left out."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(", ".join(names))
        self.names = ", ".join(names)


def _version(answer: Mapping[str, Any]) -> str | None:
    told = (answer.get(name) for name in ("weight_version", "policy_version"))
    return next((version_text(version) for version in told if version is not None), None)


def _reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning that the server sent apart from the answer, in tags; else an empty text."""
    told = (message.get(name) for name in _REASONING)
    return next((tagged(text) for text in told if isinstance(text, str) and text.strip()), "")


def _wished(wishes: Wishes) -> dict[str, Any]:
    """What a program asks for, as OpenAI's API has it."""
    asked: dict[str, Any] = {}
    if wishes.tools:
        asked["tools"] = list(wishes.tools)
        named = {"type": "function", "function": {"name": wishes.tool_name}}
        asked["tool_choice"] = named if wishes.tool_name else wishes.tool_choice
    if wishes.response_format:
        asked["response_format"] = wishes.response_format
    return asked


def _calls(message: Mapping[str, Any]) -> list[Call]:
    """The calls that the server read from the answer. Arguments may be no JSON: models write what they like.
    Raises what reading nonsense raises, and Retryable."""
    calls = []
    for told in message.get("tool_calls") or ():
        name, arguments = told["function"]["name"], told["function"]["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise Retryable("a call whose name or arguments are no text")
        calls.append(Call("", name, arguments or "{}"))
    return calls


def _ids_and_logprobs(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """(ids, log-probs) where the endpoint gives whole lists of them. Raises Retryable on nonsense."""
    told = choice.get("logprobs")
    entries = told.get("content") if isinstance(told, dict) else None
    ids: Any = choice.get("token_ids")
    logprobs: tuple[float, ...] | None = None
    if isinstance(entries, list) and entries:
        values = [entry.get("logprob") for entry in entries]
        if not all(isinstance(v, int | float) and math.isfinite(v) and v <= 1e-6 for v in values):
            raise Retryable("an answer with a log-prob that is none")
        logprobs = tuple(min(0.0, float(v)) for v in values)
        if ids is None:
            ids = [entry.get("id") for entry in entries]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids) or not ids:
        return None, logprobs
    if logprobs is not None and len(logprobs) != len(ids):
        raise Retryable(f"an answer with {len(ids)} ids and {len(logprobs)} log-probs")
    return tuple(ids), logprobs


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    # A record with a larger number could not be read back.
    return value if type(value) is int and 0 < value <= MAX_JSON_INTEGER else 0
