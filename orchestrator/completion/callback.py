"""Completions that the program around the orchestrator samples itself: a function in the place of an endpoint."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.sampled import IdCompletions, RawSample
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.versions import Attribution
from orchestrator.rules.policy import Policy

# One answer for the prompt's ids. `finish_reason` empty: the function cannot tell a stop from a length. Raises
# Retryable for a passing fault, CompletionError, ContextLengthError.
Sampler = Callable[[CompletionRequest], Awaitable[RawSample]]


class CallbackCompleter(IdCompletions):
    """Completions of a program's function. What it gives is checked and continued like an endpoint's answers."""

    joins = True

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: HubTokenizer,
        *,
        model: str,
        timeout_s: float,
        policy: Policy,
        retry: RetryPolicy | None = None,
    ) -> None:
        endpoint = Endpoint("", model, timeout_s=timeout_s)
        super().__init__("the program", endpoint, tokenizer, retry, Attribution(policy))
        self._sampler = sampler

    async def aclose(self) -> None:
        """The function is the program's."""

    async def _sampled(
        self, request: CompletionRequest, model: str, timeout_s: float, headers: Mapping[str, str] | None
    ) -> RawSample:
        sampled = await self._sampler(request)
        if sampled.finish_reason:
            return sampled
        ended = bool(sampled.ids) and self._tokenizer.stops(sampled.ids[-1])
        return replace(sampled, finish_reason="stop" if ended else "length")
