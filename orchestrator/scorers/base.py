"""What every way of grading offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator.types import Ended, Record, RolloutPlan, Score

# What a row of a dataset may name as its `scorer`: ours alone, never code of its own.
ROW_SCORERS = ("gaia", "exact", "reasoning_gym")
# Those that grade without a reference answer, and the metadata they grade by.
NEEDS_NO_ANSWER: Mapping[str | None, tuple[str, ...]] = {"reasoning_gym": ("dataset", "seed", "index")}


class Scorer(Protocol):
    """A pure function of answer, reference answer and record."""

    def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """`record.answer` is the accepted answer; only `finished` can be correct. Raises ScorerError."""
