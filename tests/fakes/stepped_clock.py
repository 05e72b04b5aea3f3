"""`orchestrator` on a machine whose wall clock jumps by days with every look at it, forth and back."""

from __future__ import annotations

import itertools
import sys
import time

DAY_S = 86_400.0
STEPPED_CLOCK = (sys.executable, "-m", "tests.fakes.stepped_clock")


def main() -> int:
    """Before any of our modules takes the clock."""
    real, steps = time.time, itertools.cycle((10 * DAY_S, -10 * DAY_S, 0.0))
    time.time = lambda: real() + next(steps)
    time.time_ns = lambda: int(time.time() * 1e9)
    from orchestrator.cli import main as orchestrator

    return orchestrator()


if __name__ == "__main__":
    sys.exit(main())
