"""Keeps what was sampled for groups that are not yet written or delivered, so that nothing is sampled twice."""

from collections.abc import Callable
from typing import Any

import orjson

from orchestrator.completion.base import Tokenizer
from orchestrator.rules.observer import Listener
from orchestrator.run.earlier import Earlier, group_number
from orchestrator.run.lines import texts
from orchestrator.run.output import OpenRun
from orchestrator.types import Attempt, Group, Member, RolloutPlan

Result = Member | Attempt


class Kept(Listener):
    """Results of rollouts by group, and whole groups: `made` ones that are not written yet, and `written` ones
    that an earlier process did not deliver."""

    def __init__(self) -> None:
        self.made: dict[int, Group] = {}
        self.written: dict[int, list[dict[str, Any]]] = {}
        self._results: dict[int, dict[str, Result]] = {}
        self._earlier = Earlier()

    def attempt(self, result: Result) -> None:
        plan = result.attempt.plan if isinstance(result, Member) else result.plan
        self._results.setdefault(plan.group, {})[plan.rollout_id] = result

    def forget(self, number: int) -> Group | None:
        """Forgets a group that does not come again; returns it if it was made."""
        self._results.pop(number, None)
        return self.made.pop(number, None)

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Result | None:
        """The result of this attempt; None: it is still to be made."""
        result = self._results.get(plan.group, {}).get(plan.rollout_id)
        return result or self._earlier.result(plan, tokenizer)

    def is_bad(self, number: int) -> bool:
        """Whether an earlier process has reported this one as a bad task."""
        return number in self._earlier.bad

    def read(self, output: OpenRun, is_done: Callable[[int], bool]) -> None:
        """Reads the files of a run that is continued."""
        self._earlier = output.earlier
        for line in texts(output.groups.path):
            number = group_number(line.place, line.text)
            if not is_done(number):
                self.written.setdefault(number, []).append(orjson.loads(line.text))
