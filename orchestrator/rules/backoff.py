"""How long to wait before something that failed is tried again. Pure: chance is an argument."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s` after the first failure in a row, then twice as long each time, never over `most_s`.

    `spread`: a pause is shorter or longer by chance, by at most this share of it, so that callers that failed
    together do not all try again together.
    """

    first_s: float
    most_s: float
    spread: float = 0.0

    def pause_s(self, failures: int, chance: float = 0.5) -> float:
        """Seconds to wait after so many failures in a row (0: none yet). `chance`: drawn between 0 and 1."""
        if failures < 1:
            return 0.0
        pause_s = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 63))
        return pause_s * (1.0 + self.spread * (2.0 * chance - 1.0))
