"""What a run may cost: no completion is asked for that could take it over the limit.

A limit opens with what an earlier process has spent. When what is under way will probably use up the rest, no
rollout is begun any more; those that run come to their end. If that guess was wrong, the completion that might
pass the limit waits for those under way, and raises CostReached if these leave too little. What a rollout asked of
the outside is known, and spent, when it is over.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from orchestrator.errors import CostReached

Price = Callable[[str, int, int], float]  # rollout id, prompt tokens, sampled tokens: their cost


class CostLimit:
    """`most`: the limit. `empty` is called once, when no rollout may be begun any more."""

    def __init__(self, most: float, price: Price, empty: Callable[[], None]) -> None:
        self.most = most
        self.spent = 0.0
        self.is_empty = False
        self._price = price
        self._empty = empty
        self._earlier = 0.0
        self._held: list[float] = []  # of completions under way
        self._settled = asyncio.Event()
        self._running: set[tuple[str, object]] = set()  # ids and places: an evaluation's may have the same ids
        self._unscored: set[object] = set()  # places of attempts that were paid and lack their score
        self._over = 0
        self._cost_of_over = 0.0

    @asynccontextmanager
    async def hold(
        self, rollout_id: str, prompt_tokens: int, most_tokens: int
    ) -> AsyncIterator[Callable[[int, int], None]]:
        """Within this block a completion is asked for, of at most so many tokens. Yields a function that takes the
        tokens it really had. Waits for others under way where these may leave enough. Raises CostReached before
        anything is asked."""
        price = self._price(rollout_id, prompt_tokens, most_tokens)
        while self.spent + math.fsum(self._held) + price > self.most:
            if not self._held:
                raise self.reached
            self._settled.clear()
            await self._settled.wait()
        self._held.append(price)

        def settle(prompt: int, sampled: int) -> None:
            self.spent += self._price(rollout_id, prompt, sampled)

        try:
            yield settle
        finally:
            self._held.remove(price)
            self._settled.set()

    @property
    def reached(self) -> CostReached:
        """The error that ends the run."""
        return CostReached(f"env.max_cost: the run has cost {self.spent:.4f} of {self.most:g}; raise it to go on")

    def begun(self, rollout_id: str, place: object) -> None:
        """A rollout is begun. `place`: as in `ended`."""
        self._running.add((rollout_id, place))
        self._look()

    def ended(
        self, rollout_id: str, place: object, cost: float, *, graded: bool, held: bool, apart: float = 0.0
    ) -> None:
        """An attempt is on record. `place`: of its group, the same for the attempt that brings the score of one
        that has none. `held`: its completions were held here, and not sampled on another machine. `apart`: what
        else it cost. Raises CostReached if completions that were not held were too many."""
        made_here = (rollout_id, place) in self._running
        self._running.discard((rollout_id, place))
        if made_here:
            self._over += 1
            self._cost_of_over += cost
            if not graded:
                self._unscored.add(place)
        if made_here and held:
            self.spent += apart
        elif made_here or place not in self._unscored:
            self._spend(cost)
        if not made_here:
            self._unscored.discard(place)
        self._look()

    def open(self, spent: float, ungraded: Iterable[object] = ()) -> None:
        """What an earlier process has spent, and the places of its attempts that lack their score. If nothing is
        left, no rollout is begun."""
        self.spent = self._earlier = spent
        self._unscored.update(ungraded)
        if self.spent >= self.most:
            self._close()

    def _spend(self, cost: float) -> None:
        self.spent += cost
        if cost and self.spent > self.most:
            raise self.reached

    def _look(self) -> None:
        """Rollouts under way, and the next one, are taken to cost what those before them did."""
        mean = self._cost_of_over / self._over if self._over else 0.0
        if self._earlier + self._cost_of_over + mean * (len(self._running) + 1) > self.most:
            self._close()

    def _close(self) -> None:
        if not self.is_empty:
            self.is_empty = True
            self._empty()
