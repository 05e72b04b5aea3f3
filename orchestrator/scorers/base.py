"""What every way of grading offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator.types import Ended, Record, RolloutPlan, Score

# What a row of a dataset may name as its `scorer`: ours alone, never code of its own.
ROW_SCORERS = ("gaia", "exact", "reasoning_gym")
# Those that grade without a reference answer, and the metadata they grade by.
NEEDS_NO_ANSWER: Mapping[str | None, tuple[str, ...]] = {"reasoning_gym": ("dataset", "seed", "index")}

# How much each measured part weighs in `combined`.
COMBINED_WEIGHTS: Mapping[str, float] = {
    "correctness": 0.50,
    "format": 0.20,
    "final_answer": 0.10,
    "execution": 0.10,
    "efficiency": 0.10,
}


class Scorer(Protocol):
    """A function of answer, reference answer and record, and of nothing that happened before."""

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """`record.answer` is the accepted answer; only `finished` can be correct. Raises ScorerError."""
