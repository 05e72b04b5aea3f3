"""Several endpoints as one: each rollout stays with one endpoint, where its prefix is cached. And how many
requests may be at one endpoint at a time, for training and for evaluation."""

import asyncio
from collections.abc import Mapping, Sequence

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.rules.plan import server_of
from orchestrator.types import Completion, Split


class LimitedCompleter:
    """Implements Atropos' `num_max_requests_at_once` and `num_requests_for_eval`. Waiting for a slot counts as
    waiting for the endpoint: it does not use up the rollout's own clock."""

    def __init__(self, completer: Completer, *, training: int, evaluation: int) -> None:
        self.takes_ids, self.guides = completer.takes_ids, completer.guides
        self._completer = completer
        self._slots: Mapping[Split, asyncio.Semaphore] = {
            "train": asyncio.Semaphore(training),
            "eval": asyncio.Semaphore(evaluation),
        }

    async def sample(self, request: CompletionRequest) -> Completion:
        async with self._slots[request.split]:
            return await self._completer.sample(request)

    async def aclose(self) -> None:
        await self._completer.aclose()


class RoutedCompleter:
    """Spreads rollouts over completers by weight, the same rollout always to the same one."""

    def __init__(self, completers: Sequence[Completer], weights: Sequence[float]) -> None:
        self.takes_ids = all(completer.takes_ids for completer in completers)
        self.guides = all(completer.guides for completer in completers)
        self._completers = completers
        self._weights = tuple(weights)

    def serving(self, rollout_id: str) -> tuple[Completer, int]:
        """(the completer that serves this rollout, its index)."""
        place = server_of(rollout_id, self._weights)
        return self._completers[place], place

    async def sample(self, request: CompletionRequest) -> Completion:
        return await self.serving(request.rollout_id)[0].sample(request)

    async def aclose(self) -> None:
        for completer in self._completers:
            await completer.aclose()
