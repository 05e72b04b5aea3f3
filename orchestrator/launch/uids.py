"""User ids of live sandboxes: each has two of its own, and a range for an agent that may be root inside.

The kernel limits processes, inotify instances, pipe buffers, keys and message queues per uid over all containers:
with a shared uid one sandbox could use up what its neighbours need.
"""

import random
from dataclasses import dataclass
from threading import Lock

FIRST_UID = 20_000
LAST_UID = 59_999
SLOTS = (LAST_UID - FIRST_UID + 1) // 2
RANGE_IDS = 65_536  # users of one sandbox that its agent may become
# Above what shadow-utils hands out as subordinate ids; the last range ends below 2^31, beyond which programs fail.
FIRST_OF_RANGES = 0x2600_0000


@dataclass(frozen=True, slots=True)
class UidPair:
    """The identities inside one sandbox: agent loop, and model-written code."""

    runner: int
    worker: int

    @property
    def first_of_range(self) -> int:
        """The first of RANGE_IDS ids, outside, of the users that the agent may become: no other pair has them."""
        return FIRST_OF_RANGES + (self.runner - FIRST_UID) // 2 * RANGE_IDS


class UidSlots:
    """Hands out pairs that no other live sandbox of this process has. Thread-safe.

    The first pair is random, so that several orchestrators on one machine seldom use the same ones. A released
    pair is handed out last, so that a late process of its former sandbox shares it with no other.
    """

    def __init__(self, start: int | None = None) -> None:
        self._next = random.randrange(SLOTS) if start is None else start  # noqa: S311
        self._in_use: set[int] = set()
        self._lock = Lock()

    def take(self) -> UidPair:
        """A free pair. Raises RuntimeError if 20,000 sandboxes are alive."""
        with self._lock:
            for step in range(SLOTS):
                slot = (self._next + step) % SLOTS
                if slot not in self._in_use:
                    self._in_use.add(slot)
                    self._next = slot + 1
                    return UidPair(FIRST_UID + 2 * slot, FIRST_UID + 2 * slot + 1)
        raise RuntimeError("every user id is in use")

    def release(self, pair: UidPair) -> None:
        """Frees the pair. Every process of the sandbox must have ended."""
        with self._lock:
            self._in_use.discard((pair.runner - FIRST_UID) // 2)
