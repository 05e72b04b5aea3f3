"""Pauses launching while Docker or the endpoint does not work.

A failed rollout alone proves nothing: its prompt or its image may be at fault. So the service is asked a question
of its own. Launching pauses only if that fails too, and until it succeeds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from orchestrator.errors import (
    AuthenticationError,
    EngineUnfitError,
    EnvironmentUnusable,
    LaunchError,
    RolloutError,
    RunUnhealthy,
)
from orchestrator.rules.backoff import Backoff

log = logging.getLogger(__name__)

BETWEEN_QUESTIONS = Backoff(first_s=0.5, most_s=10.0)
PATIENCE_S = 900.0  # a model takes minutes to load; a longer outage needs an operator
LOOKS = 3  # tries before an EngineUnfitError ends the run: a disk may be remounted meanwhile


@dataclass(eq=False, slots=True)
class Breaker:
    """Pauses launching while the service named `what` does not work. `ask` raises a RolloutError if the service
    does not answer, a LaunchError if it refuses, an EngineUnfitError if it will always refuse."""

    what: str
    ask: Callable[[], Awaitable[object]]
    say: Callable[[str], None]
    _: KW_ONLY
    backoff: Backoff = BETWEEN_QUESTIONS
    patience_s: float = PATIENCE_S
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _away_since: float | None = None  # loop time; None: the service works
    _refuses: bool = False  # the service answers, but refuses

    @property
    def is_away(self) -> bool:
        """Whether the service failed when it was last asked."""
        return self._away_since is not None

    async def away(self) -> bool:
        """Called after a failure: whether the service fails now."""
        if self._away_since is None:
            async with self._asking:
                if self._away_since is None and (error := await self._failure()) is not None:
                    self._away_since = asyncio.get_running_loop().time()
                    self._refuses = isinstance(error, LaunchError)
                    how = "makes no sandboxes" if self._refuses else "is away"
                    self.say(f"{self.what} {how}, launching pauses: {error}")
        return self._away_since is not None

    async def passed(self) -> None:
        """Returns once the service works. Raises RunUnhealthy after `patience_s`, or after an EngineUnfitError."""
        if self._away_since is None:
            return
        loop = asyncio.get_running_loop()
        async with self._asking:  # one caller asks, the others wait for the answer
            looks = 0
            while self._away_since is not None:
                looks += 1
                await asyncio.sleep(self.backoff.pause_s(looks))
                away_s = loop.time() - self._away_since
                error = await self._failure()
                if error is None:
                    self._away_since = None
                    back = "makes sandboxes again" if self._refuses else "is back"
                    goes_on = "rollouts go on" if self._refuses else "launching goes on"
                    self.say(f"{self.what} {back} after {away_s:.0f} s, {goes_on}")
                    return
                self._refuses = isinstance(error, LaunchError)
                if isinstance(error, EngineUnfitError) and looks >= LOOKS:
                    raise RunUnhealthy(f"waiting does not help: {error}")
                if away_s > self.patience_s:
                    how = "made no sandbox" if self._refuses else "been away"
                    raise RunUnhealthy(f"{self.what} has {how} for {away_s:.0f} s: {error}")

    async def _failure(self) -> RolloutError | EnvironmentUnusable | None:
        try:
            await self.ask()
        except AuthenticationError:
            raise
        except (RolloutError, EnvironmentUnusable) as error:
            return error
        return None
