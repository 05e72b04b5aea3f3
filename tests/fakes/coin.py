"""A scorer that any text satisfies in half of all cases: groups of a model with random weights differ in score."""

from __future__ import annotations

import zlib

from orchestrator.types import Ended, Record, RolloutPlan


def score(plan: RolloutPlan, record: Record, ended: Ended) -> float:
    """1 or 0, by what was sampled."""
    return float(zlib.crc32("".join(turn.completion.text for turn in record.turns).encode()) % 2)
