"""Which node gets the next rollout. Pure: no clock, no randomness.

The node with the most free room gets it: among those that have its image before the others, and among those with a
warm sandbox before the others. Among equals it is the one that has had its room for longest.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

N = TypeVar("N")


class Rooms(Generic[N]):
    """How much room each node has."""

    def __init__(self) -> None:
        self._rank: dict[N, tuple[bool, int]] = {}

    def set(self, node: N, free: int, *, warm: bool) -> None:
        """The node has room for `free` rollouts, and something warm for the next one or not. 0: it gets none."""
        rank = (not warm, -free)
        if free <= 0 or self._rank.get(node) != rank:
            self._rank.pop(node, None)
        if free > 0:
            self._rank[node] = rank

    def best(self, preferred: Iterable[N] = ()) -> N | None:
        """The node for the next rollout: one of `preferred` if any of these has room. None: no node has room."""
        candidates = [node for node in preferred if node in self._rank]
        return min(candidates or self._rank, key=self._rank.__getitem__, default=None)
