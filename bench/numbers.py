"""Medians, percentiles, ratios of pairs. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: a value that was really measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def long_tail(count: int, median: float, seed: int) -> list[float]:
    """Log-normal, sigma 1: one in a hundred is ten times the median. The same for the same seed."""
    draw = random.Random(seed)
    return [median * draw.lognormvariate(0.0, 1.0) for _ in range(count)]


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of what was measured in turns: drift of the machine hits both sides of a pair."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def difference_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the differences, as above."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
