"""What every way of grading offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator.types import Ended, Record, RolloutPlan, Score

# What a row of a dataset may name as its `scorer`: ours alone, never code of its own.
ROW_SCORERS = ("gaia", "exact", "reasoning_gym")
# Those that grade without a reference answer, and the metadata they grade by.
NEEDS_NO_ANSWER: Mapping[str | None, tuple[str, ...]] = {"reasoning_gym": ("dataset", "seed", "index")}
# All that a reasoning_gym task is made again from: the names in its metadata.
MADE_FROM = ("dataset", "seed", "index", "size", "config")

# How much each measured part weighs in `combined`.
COMBINED_WEIGHTS: Mapping[str, float] = {
    "correctness": 0.50,
    "format": 0.20,
    "final_answer": 0.10,
    "execution": 0.10,
    "efficiency": 0.10,
}


class Scorer(Protocol):
    """A function of answer, reference answer and record, and of nothing that happened before.

    Whatever the policy wrote gets a score: where grading fails on it and not on a control without a word of the
    policy's, it is 0, with the failure on record (`Score.failure`). So nothing is drawn again that chosen text
    could ask for.
    """

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """`record.answer` is the accepted answer; only `finished` can be correct. Raises ScorerError, where a
        control gets no score either."""
