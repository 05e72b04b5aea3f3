"""`python:MODULE:SCORER`: a scorer of the operator's own, held to the same rules as ours."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.plugins import load_object
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.correctness import correctness
from orchestrator.types import Ended, Record, RolloutPlan, Score

_FLAG = "env.scoring_strategy"


@dataclass(frozen=True, slots=True)
class PythonScorer:
    """Calls the operator's function; whatever it does wrong is a ScorerError, never a reward."""

    spec: str
    function: Callable[[RolloutPlan, Record, Ended], object]

    def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError for an exception, and for a result that is no finite number in [0, 1]."""
        try:
            result = self.function(plan, record, ended)
        except Exception as error:  # somebody else's code: anything can come out of it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ScorerError(f"{self.spec} raised {reason}") from error
        given = result if isinstance(result, Score) else Score(self._number(result, "score", 0.0, 1.0))
        parts = {
            str(name): self._number(value, f"part {name}", -math.inf, math.inf)
            for name, value in given.parts.items()
        }
        if "correctness" not in parts and plan.task.answer is not None:
            # `evaluate` reports it for every scorer.
            parts["correctness"] = correctness(plan.task, record, ended)
        return Score(given.value, parts)

    def _number(self, value: object, what: str, lowest: float, highest: float) -> float:
        # numbers.Real: numpy's are none of Python's. bool too: True is a fair answer to "correct?".
        if isinstance(value, Real):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and lowest <= number <= highest:
                return number
        wanted = "a finite number" if highest == math.inf else f"a number in [{lowest:g}, {highest:g}]"
        raise ScorerError(f"{self.spec} gave the {what} {ascii(value)[:80]}, not {wanted}")


def python_scorer(spec: str) -> Scorer:
    """A function `(plan, record, ended)`, an object with such a `score`, or a class of such objects.

    Raises ConfigError.
    """
    found: Any = load_object(spec, _FLAG)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:  # somebody else's code
            raise ConfigError(f"{_FLAG}: {spec} cannot be made: {' '.join(str(error).split())[:300]}") from error
    function = getattr(found, "score", found)
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: {spec} cannot be called as score(plan, record, ended)") from error
    return PythonScorer(spec, function)
