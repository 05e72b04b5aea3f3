"""When not to launch: the Engine or the endpoint is away or cannot, or nearly everything breaks.

A failed rollout alone proves nothing: its prompt, its image may be at fault. So the thing that failed it
is asked, without any rollout. Only where it gives no answer is launching paused, until it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from orchestrator.backoff import Backoff
from orchestrator.errors import (
    AuthenticationError,
    EngineUnfitError,
    EnvironmentUnusable,
    LaunchError,
    RolloutError,
    RunUnhealthy,
)
from orchestrator.types import Failed, FailedName

log = logging.getLogger(__name__)

BETWEEN_QUESTIONS = Backoff(first_s=0.5, most_s=10.0)
PATIENCE_S = 900.0  # a model takes minutes to load; what stays away for longer needs somebody to look
LOOKS = 3  # after a failure that no waiting ends: a disk may be remounted in that very moment
WINDOW = 32
LEAST = 16
GROUPS = 12  # that many dead tasks in a row are no accident; ten may well be
UNHEALTHY = 0.75
_OTHERS_FAULT = frozenset((FailedName.BAD_TASK, FailedName.CANCELLED))


class Breaker:
    """Pauses launching while `what` is away. `ask` raises a RolloutError where it gives no answer, a LaunchError
    where it answers that it cannot, and an EngineUnfitError where it never will."""

    def __init__(
        self,
        what: str,
        ask: Callable[[], Awaitable[object]],
        say: Callable[[str], None],
        *,
        backoff: Backoff = BETWEEN_QUESTIONS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.what = what
        self._ask = ask
        self._say = say
        self._backoff = backoff
        self._patience_s = patience_s
        self._asking = asyncio.Lock()
        self._away_since: float | None = None  # loop time; None: it is there
        self._refuses = False  # since then: it is there and cannot, or will not

    async def away(self) -> bool:
        """After a failure: whether `what` gives no answer now."""
        if self._away_since is None:
            async with self._asking:
                if self._away_since is None and (error := await self._failure()) is not None:
                    self._away_since = asyncio.get_running_loop().time()
                    self._refuses = isinstance(error, LaunchError)
                    how = "makes no sandboxes" if self._refuses else "is away"
                    self._say(f"{self.what} {how}, launching pauses: {error}")
        return self._away_since is not None

    async def passed(self) -> None:
        """Returns when nothing speaks against a launch. Raises RunUnhealthy when patience is at its end."""
        if self._away_since is None:
            return
        loop = asyncio.get_running_loop()
        async with self._asking:  # one asks, the others wait for its answer
            asked = 0
            while self._away_since is not None:
                asked += 1
                await asyncio.sleep(self._backoff.pause_s(asked))
                away_s = loop.time() - self._away_since
                error = await self._failure()
                if error is None:
                    self._away_since = None
                    back = "makes sandboxes again" if self._refuses else "is back"
                    goes_on = "rollouts go on" if self._refuses else "launching goes on"
                    self._say(f"{self.what} {back} after {away_s:.0f} s, {goes_on}")
                elif isinstance(error, EngineUnfitError) and asked >= LOOKS:
                    raise RunUnhealthy(f"no waiting helps: {error}")
                elif away_s > self._patience_s:
                    how = "made no sandbox" if self._refuses else "been away"
                    raise RunUnhealthy(f"{self.what} has {how} for {away_s:.0f} s: {error}")

    async def _failure(self) -> RolloutError | EnvironmentUnusable | None:
        try:
            await self._ask()
        except AuthenticationError:
            raise
        except (RolloutError, EnvironmentUnusable) as error:
            return error
        return None


class HealthGate:
    """Ends a run in which most of the last rollouts broke for good, for reasons that are nobody's policy.

    Counted is what became of a rollout in the end, once, however often it was tried. Some tasks break whatever is
    tried, and may come in a row: failures count when they are those of `groups` groups, and not where the group is
    known to break from an earlier process of the run. `window`: rollouts looked back at, at least those of so many
    groups.
    """

    def __init__(self, *, window: int = WINDOW, least: int = LEAST, groups: int = GROUPS) -> None:
        self._last: deque[tuple[int, Failed | None]] = deque(maxlen=max(window, least))
        self._least = least
        self._groups = groups
        self._broke_before: set[int] = set()

    def broke_before(self, group: int, failure: Failed) -> None:
        """A rollout of this group broke in an earlier process: should others do, that tells nothing new."""
        if failure.name not in _OTHERS_FAULT:
            self._broke_before.add(group)

    def count(self, group: int, failure: Failed | None) -> None:
        """One rollout more; None: it did not break. Raises RunUnhealthy, naming the commonest cause."""
        if failure is not None and group in self._broke_before:
            return
        self._last.append((group, None if failure is None or failure.name in _OTHERS_FAULT else failure))
        failures = [failed for _, failed in self._last if failed is not None]
        if len(self._last) < self._least or len(failures) < UNHEALTHY * len(self._last):
            return
        groups = len({group for group, failed in self._last if failed is not None})
        if groups < self._groups:
            return
        (name, count), *_ = Counter(failed.name for failed in failures).most_common(1)
        reason = next(failed.reason for failed in reversed(failures) if failed.name is name)
        raise RunUnhealthy(
            f"{len(failures)} of the last {len(self._last)} rollouts broke, {count} of them by {name}, "
            f"in {groups} groups, the last one so: {reason}"
        )
