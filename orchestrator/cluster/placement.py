"""Which node gets the next rollout. Pure: no clock, no randomness.

The node with the most free room gets it: among those that have its image before the others, and among those with a
warm sandbox before the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

N = TypeVar("N")
_SLACK = 64  # outdated entries that are kept before they are swept out

Rank = tuple[bool, int]


class Rooms(Generic[N]):
    """How much room each node has. In a heap, whose outdated entries are skipped: a choice costs the logarithm of
    the number of nodes, not their number."""

    def __init__(self) -> None:
        self._rank: dict[N, Rank] = {}
        self._heap: list[tuple[Rank, int, N]] = []
        self._arrivals = itertools.count()

    def set(self, node: N, free: int, *, warm: bool) -> None:
        """The node has room for `free` rollouts, and something warm for the next one or not. 0: it gets none."""
        if free <= 0:
            self._rank.pop(node, None)
            return
        rank = (not warm, -free)
        if self._rank.get(node) == rank:
            return
        self._rank[node] = rank
        if len(self._heap) > 4 * len(self._rank) + _SLACK:
            self._heap = [(rank, next(self._arrivals), node) for node, rank in self._rank.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, next(self._arrivals), node))

    def best(self, preferred: Iterable[N] = ()) -> N | None:
        """The node for the next rollout: one of `preferred` if any of these has room. None: no node has room."""
        there = [node for node in preferred if node in self._rank]
        if there:
            return min(there, key=self._rank.__getitem__)
        while self._heap:
            rank, _, node = self._heap[0]
            if self._rank.get(node) == rank:
                return node
            heapq.heappop(self._heap)
        return None
