"""How rollouts are graded: `make_scorer` gives the scorer that `env.scoring_strategy` names."""

from __future__ import annotations

import difflib

from orchestrator.errors import ConfigError
from orchestrator.plugins import PREFIX
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.strategies import STRATEGIES, StrategyScorer


def make_scorer(strategy: str, *, length_penalty_weight: float = 0.1, debug: bool = False) -> Scorer:
    """One scorer for a whole run; what a task says of its own grading is respected. Raises ConfigError."""
    if strategy in STRATEGIES:
        return StrategyScorer(strategy, length_penalty_weight, debug)
    if strategy.startswith(PREFIX):
        from orchestrator.scorers.python import python_scorer

        return python_scorer(strategy)
    near = difflib.get_close_matches(strategy, STRATEGIES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    valid = ", ".join((*STRATEGIES, "python:MODULE:SCORER"))
    raise ConfigError(f"env.scoring_strategy: {strategy!r} is unknown; {hint}valid are {valid}")
