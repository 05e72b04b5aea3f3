"""Completers that say what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.line import cut_at_stop
from orchestrator.types import Completion


def text_completion(text: str, stop: Sequence[str] = (), finish: str = "stop") -> Completion:
    """What a chat endpoint gives: text, no ids."""
    return Completion(
        text=text,
        visible=cut_at_stop(text, tuple(stop)),
        finish_reason="length" if finish == "length" else "stop",
        tokens_T=None,
        logprobs_T=None,
        prompt_tokens=10,
        completion_tokens=max(1, len(text) // 4),
    )


class ScriptedCompleter:
    """Answers in turn; an exception in the script is raised. Remembers what it was asked."""

    takes_ids = False
    guides = False

    def __init__(self, script: Sequence[str | Exception], gate: asyncio.Event | None = None) -> None:
        self._script = list(script)
        self._gate = gate
        self.requests: list[CompletionRequest] = []
        self.cancelled = 0

    async def sample(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        if self._gate is not None:
            try:
                await self._gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        answer = self._script[min(len(self.requests), len(self._script)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return text_completion(answer, request.stop)

    async def aclose(self) -> None:
        """Nothing is open."""


class FunctionCompleter(ScriptedCompleter):
    """Answers by a function of the request."""

    def __init__(self, answer: Callable[[CompletionRequest], str]) -> None:
        super().__init__([""])
        self._answer = answer

    async def sample(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        return text_completion(self._answer(request), request.stop)
