"""When something that happens every n trainer steps is due."""

from __future__ import annotations


class Gate:
    """Due once whenever the step has entered another span of `every` steps. `every` below 1: never.

    The trainer may advance several steps between two looks. Comparing remainders, as Atropos does, then
    misses some, and never opens for `every` = 1.
    """

    def __init__(self, every: int, step: int) -> None:
        self._every = every
        self._span = self._of(step)

    def due(self, step: int) -> int | None:
        """The multiple of `every` that was reached since the last call; None: none was. After a step back,
        counting goes on from there."""
        span = self._of(step)
        reached = span > self._span
        self._span = span
        return span * self._every if reached else None

    def _of(self, step: int) -> int:
        return step // self._every if self._every > 0 else 0
