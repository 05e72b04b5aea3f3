"""Limits on requests at one endpoint at a time, for training and for evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.types import Completion, Split


class LimitedCompleter:
    """Implements Atropos' `num_max_requests_at_once` and `num_requests_for_eval`. Waiting for a slot counts as
    waiting for the endpoint: it does not use up the rollout's own clock."""

    def __init__(self, completer: Completer, *, training: int, evaluation: int) -> None:
        self._completer = completer
        self._slots: Mapping[Split, asyncio.Semaphore] = {
            "train": asyncio.Semaphore(training),
            "eval": asyncio.Semaphore(evaluation),
        }

    @property
    def takes_ids(self) -> bool:
        return self._completer.takes_ids

    async def sample(self, request: CompletionRequest) -> Completion:
        async with self._slots[request.split]:
            return await self._completer.sample(request)

    async def aclose(self) -> None:
        await self._completer.aclose()
