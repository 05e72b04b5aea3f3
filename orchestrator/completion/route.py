"""Several endpoints as one: each rollout stays with one of them, where its prefix is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.types import Completion


class RoutedCompleter:
    """Spreads rollouts over completers by weight, the same rollout always to the same one."""

    def __init__(self, completers: Sequence[Completer], weights: Sequence[float]) -> None:
        total = sum(weights)
        self._completers = completers
        self._shares = [weight / total for weight in weights]

    @property
    def takes_ids(self) -> bool:
        return all(completer.takes_ids for completer in self._completers)

    async def sample(self, request: CompletionRequest) -> Completion:
        return await self._completers[self.place(request.rollout_id)].sample(request)

    def place(self, rollout_id: str) -> int:
        """Index of the completer that serves this rollout."""
        digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64
        for index, share in enumerate(self._shares):
            if point < share:
                return index
            point -= share
        return len(self._shares) - 1

    async def aclose(self) -> None:
        for completer in self._completers:
            await completer.aclose()
