"""What every scorer offers, and names that tasks, settings and scorers share."""

from collections.abc import Mapping
from typing import Protocol

from orchestrator.types import Ended, Record, RolloutPlan, Score

# What a row of a data set may name as its `scorer`: ours only, never code.
ROW_SCORERS = ("gaia", "exact", "reasoning_gym")
# Scorers that need no reference answer → the metadata they need instead.
NEEDS_NO_ANSWER: Mapping[str | None, tuple[str, ...]] = {"reasoning_gym": ("dataset", "seed", "index")}
# Names of the metadata from which a reasoning_gym task is made again.
MADE_FROM = ("dataset", "seed", "index", "size", "config")


class Scorer(Protocol):
    """A function of answer, reference answer and record, without any state.

    Whatever the policy wrote gets a score. If grading fails on it but not on a control, which holds nothing of the
    policy's, the score is 0 with the failure on record (`Score.failure`). So no policy can write a text that earns
    another try.
    """

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """`record.answer` is the accepted answer; only `finished` can be correct. Raises ScorerError if a control
        gets no score either."""
