"""What the completions of a run may cost together: no completion is asked for that could take it over the limit.

A purse opens with what an earlier process has spent. When what is under way will probably use up the rest, no
rollout is begun any more; those that run come to their end. If that guess was wrong, the completion that might
pass the limit raises CostReached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.errors import CostReached

Price = Callable[[str, int, int], float]  # rollout id, prompt tokens, sampled tokens: their cost


class Purse:
    """`most`: the limit. `empty` is called once, when no rollout may be begun any more."""

    def __init__(self, most: float, price: Price, empty: Callable[[], None]) -> None:
        self.most = most
        self.spent = 0.0
        self.is_empty = False
        self._price = price
        self._empty = empty
        self._earlier = 0.0
        self._held = 0.0
        self._running = 0
        self._over = 0
        self._cost_of_over = 0.0

    @contextmanager
    def hold(self, rollout_id: str, prompt_tokens: int, most_tokens: int) -> Iterator[Callable[[int, int], None]]:
        """Within this block a completion is asked for, of at most so many tokens. Yields a function that takes the
        tokens it really had. Raises CostReached before anything is asked."""
        held = self._price(rollout_id, prompt_tokens, most_tokens)
        if self.spent + self._held + held > self.most:
            raise self.reached
        self._held += held

        def settle(prompt: int, sampled: int) -> None:
            self.spent += self._price(rollout_id, prompt, sampled)

        try:
            yield settle
        finally:
            self._held -= held

    @property
    def reached(self) -> CostReached:
        """The error that ends the run."""
        return CostReached(
            f"env.max_cost: completions have cost {self.spent:.4f} of {self.most:g}; raise it to go on"
        )

    def begun(self) -> None:
        """A rollout is begun."""
        self._running += 1
        self._look()

    def ended(self, cost: float, *, spend: bool) -> None:
        """A rollout is over. `spend`: nobody held its completions, as they were sampled on another machine. Raises
        CostReached if these were too many."""
        self._running = max(0, self._running - 1)
        self._over += 1
        self._cost_of_over += cost
        if spend and cost:
            self.spent += cost
            if self.spent >= self.most:
                raise self.reached
        self._look()

    def open(self, spent: float) -> None:
        """What an earlier process has spent. Raises CostReached if nothing is left."""
        self.spent = self._earlier = spent
        if self.spent >= self.most:
            raise self.reached

    def _look(self) -> None:
        """Rollouts under way, and the next one, are taken to cost what those before them did."""
        mean = self._cost_of_over / self._over if self._over else 0.0
        if self._earlier + self._cost_of_over + mean * (self._running + 1) > self.most and not self.is_empty:
            self.is_empty = True
            self._empty()
