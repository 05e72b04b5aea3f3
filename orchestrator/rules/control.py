"""The control question that decides who is to blame for a failure of a service.

Once a policy has sampled a token, it may have chosen the text that a service failed on. If such a failure were
drawn again for free, the policy could provoke it to get another try. So the service is asked a question that
holds nothing of the policy's. Only if that fails too, the service is to blame.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

TIMEOUT_S = 60.0
CACHE_S = 5.0  # how old an answer may be after an outright refusal: a refusal is no sign of an outage


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """`failure`: how the control question failed; None: the service answered `reply`."""

    reply: str = ""
    failure: Exception | None = None

    @property
    def served(self) -> bool:
        """Whether the service works, so that the failure was the policy's own doing."""
        return self.failure is None

    def remark(self) -> str:
        """For the record, appended to the failure's text."""
        if self.failure is not None:
            return f"a neutral question fails too: {self.failure or type(self.failure).__name__}"
        return f"a neutral question was answered: {' '.join(self.reply.split())[:80]!r}"


class Control:
    """The control question of one service. Rollouts that failed before it was asked share its answer."""

    def __init__(self, ask: Callable[[], Awaitable[str]], *, timeout_s: float = TIMEOUT_S) -> None:
        """`ask` returns the service's answer. Whatever it raises is a failure of the service."""
        self._ask = ask
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._answer = ControlAnswer()
        self.questions = 0

    async def answer(self, *, age_s: float = 0.0) -> ControlAnswer:
        """An answer to a question asked no longer than `age_s` seconds ago; 0: after this call."""
        loop = asyncio.get_running_loop()
        since = loop.time() - age_s
        async with self._lock:
            if self._asked_at < since:
                asked_at = loop.time()
                self._answer = await self._put()
                self._asked_at = asked_at
            return self._answer

    async def _put(self) -> ControlAnswer:
        self.questions += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return ControlAnswer(await self._ask())
        except TimeoutError:
            return ControlAnswer(failure=TimeoutError(f"no answer within {self._timeout_s:g} s"))
        except Exception as error:  # a tool's service, a template, a client: each fails in its own way
            return ControlAnswer(failure=error)
