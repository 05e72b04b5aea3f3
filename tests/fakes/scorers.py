"""A strategy without a process of its own, for tests that are not about how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import Ended, Record, RolloutPlan, Score


@dataclass(frozen=True, slots=True)
class DirectScorer:
    strategy: str

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        return StrategyScorer(self.strategy).measure(plan, record, ended)
