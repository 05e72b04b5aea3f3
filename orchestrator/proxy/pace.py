"""How fast one sandbox may call.

Every call costs the one event loop that serves all sandboxes, the refused and the abandoned ones too.
An honest agent makes two calls a step; a flood, by reconnecting for each call if need be, makes thousands
a second. So calls are counted before anything is read of them, wait their turn beyond a rate, and a
sandbox that is far ahead of it has ended its rollout.
"""

from __future__ import annotations

import asyncio

CALLS_PER_S = 50.0
BURST = 200  # what a whole rollout of default limits makes when completions cost no time
MAX_AHEAD = 400  # calls that wait, or were abandoned waiting


class Pace:
    """A bucket of BURST calls, filled at CALLS_PER_S."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._counted_s = asyncio.get_running_loop().time()
        self._flooded = False

    def count(self) -> bool:
        """One call more, whatever becomes of it. True, once: this is a flood."""
        now = asyncio.get_running_loop().time()
        self._left = min(BURST, self._left + (now - self._counted_s) * CALLS_PER_S) - 1
        self._counted_s = now
        if self._left >= -MAX_AHEAD or self._flooded:
            return False
        self._flooded = True
        return True

    async def turn(self) -> None:
        """Waits until the call that was counted last may be served."""
        if self._left < 0:
            await asyncio.sleep(-self._left / CALLS_PER_S)
