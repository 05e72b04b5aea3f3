"""Limits how fast one sandbox may call.

Every call, also a refused or abandoned one, costs time of the event loop that serves all sandboxes. An honest
agent makes two calls a step; a flood, perhaps with a new connection for each call, thousands a second. So calls
are counted before they are read. Above CALLS_PER_S they have to wait; with MAX_AHEAD too many the rollout ends.
"""

import asyncio

CALLS_PER_S = 50.0
BURST = 200  # about the calls of a whole rollout under default limits
MAX_AHEAD = 400  # calls that wait, or were abandoned while they waited


class Pace:
    """A bucket of BURST calls, filled at CALLS_PER_S."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._counted_s = asyncio.get_running_loop().time()
        self._flooded = False

    def count(self) -> bool:
        """Counts one call, whatever becomes of it. True if this is a flood; only the first time."""
        now = asyncio.get_running_loop().time()
        self._left = min(BURST, self._left + (now - self._counted_s) * CALLS_PER_S) - 1
        self._counted_s = now
        if self._left >= -MAX_AHEAD or self._flooded:
            return False
        self._flooded = True
        return True

    async def turn(self) -> None:
        """Waits until the last counted call may be served."""
        if self._left < 0:
            await asyncio.sleep(-self._left / CALLS_PER_S)
