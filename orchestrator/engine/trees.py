"""Trees of rollouts: which places of a group are trunks, and the plans of what branches from them."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.forks import BranchRule, Fork, forks_of
from orchestrator.rules.plugins import load_object, raised_at
from orchestrator.rules.text import error_line
from orchestrator.rules.waits import apart
from orchestrator.types import Attempt, Member, RolloutPlan
from orchestrator.types.prefix import branching

log = logging.getLogger(__name__)

FUNCTION_LIMIT_S = 60.0
FLAG = "env.branch"


class Branching:
    """Grows the trees of a run by one rule."""

    def __init__(self, rule: BranchRule) -> None:
        """Raises ConfigError if there is no such function."""
        self.rule = rule
        self._function = _function(rule.function) if rule.function else None
        self._is_told = False

    def trunks(self, plans: Sequence[RolloutPlan]) -> dict[int, list[RolloutPlan]]:
        """Place of a trunk → the plans that wait for it. `plans`: of a group, in the order of their places."""
        size = self.rule.tree_size(len(plans))
        starts = range(0, len(plans), size)
        return {plans[start].index: list(plans[start + 1 : start + size]) for start in starts}

    async def grown(self, trunk: Member | Attempt, plans: Sequence[RolloutPlan]) -> list[RolloutPlan]:
        """The plans that waited for this trunk, as branches of it. Those for which it has no turn, or none that a
        sandbox can be brought to, are drawn whole; all are, if it broke for good. Raises ConfigError."""
        if not isinstance(trunk, Member):
            return list(plans)
        record, parent = trunk.attempt.record, trunk.attempt.plan.rollout_id
        forks = self.rule.forks(record) if self._function is None else await self._asked(trunk, len(plans))
        turns = [fork.turn for fork in forks for _ in range(fork.width)]
        grown = list(plans)
        for place, turn in enumerate(turns):
            try:
                grown[place] = replace(plans[place], prefix=branching(parent, record, turn))
            except ValueError as error:  # its program gave up a completion, or several were under way
                self._tell(parent, turn, error)
        return grown

    def _tell(self, parent: str, turn: int, why: ValueError) -> None:
        """Once: all rollouts of a program may be so."""
        if not self._is_told:
            self._is_told = True
            log.warning(
                "%s: nothing branches from rollout %s at turn %d: %s; such places are drawn whole (said once)",
                *(FLAG, parent, turn, why),
            )

    async def _asked(self, trunk: Member, most: int) -> tuple[Fork, ...]:
        assert self._function is not None
        name = f"{FLAG}: {self.rule.function}"
        try:
            async with asyncio.timeout(FUNCTION_LIMIT_S) as limit:
                answer = await apart(partial(self._function, trunk), FLAG)
        except Exception as error:  # the operator's code
            if limit.expired():
                raise ConfigError(f"{name} took more than {FUNCTION_LIMIT_S:g} s") from error
            raise ConfigError(f"{name} raised {error_line(error)}{raised_at(error)}") from error
        try:
            return forks_of(answer, len(trunk.attempt.record.turns), most)
        except ValueError as error:
            raise ConfigError(f"{name} returned for {trunk.attempt.plan.rollout_id}: {error}") from error


def _function(spec: str) -> Callable[[Member], Any]:
    """Raises ConfigError."""
    function: Callable[[Member], Any] = load_object(spec, FLAG)
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {spec} cannot be called as forks(trunk)") from error
    return function
