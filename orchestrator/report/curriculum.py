"""What a curriculum drew, pool by pool, and whether tasks are failed that were solved before.

When a task is tested again follows from no score. While a policy is as good at a task as it was, two re-tests in
turn are as likely the one way round as the other, and while it learns a fall is less likely. So more falls than
chance brings are a policy that forgets, or one that fails on purpose to be given other tasks.
"""

from collections import Counter
from typing import Any

from orchestrator.rules.estimates import at_least, chance_of_fall
from orchestrator.run.lenient import count, text

MOST_TASKS = 100_000  # that are compared
MOST_NAMED = 10
MOST_SCORED = 1024  # of one group
FALL = 0.05  # a fall counts if chance brings one so deep no more often
TOLD = 0.001  # falls are warned of if chance brings so many no more often


class Curriculum:
    """Takes the lines of curriculum.jsonl in their order."""

    def __init__(self) -> None:
        self._pool_of: dict[str, str] = {}  # as it was last drawn
        self._drawn: Counter[str] = Counter()
        self._informative: Counter[str] = Counter()
        self._before: dict[str, tuple[int, int]] = {}  # the last re-test: solved, scored
        self._solved = self._scored = 0  # of all re-tests
        self._compared = self._deep = self._lower = self._higher = 0
        self._fell: dict[str, str] = {}

    def take(self, line: dict[str, Any]) -> None:
        task, pool = text(line.get("task_id"), 200), text(line.get("pool"), 20)
        solved, scored = count(line.get("solved")), count(line.get("scored"))
        if not pool or not solved <= scored <= MOST_SCORED or (task not in self._pool_of and self._is_full):
            return
        self._pool_of[task] = pool
        self._drawn[pool] += 1
        self._informative[pool] += line.get("differ") is True
        if scored and line.get("retest") is True:
            self._solved += solved
            self._scored += scored
            if (before := self._before.get(task)) is not None:
                self._compare(task, before, (solved, scored))
            self._before[task] = solved, scored

    @property
    def _is_full(self) -> bool:
        return len(self._pool_of) >= MOST_TASKS

    def _compare(self, task: str, before: tuple[int, int], now: tuple[int, int]) -> None:
        change = now[0] * before[1] - before[0] * now[1]
        self._compared += 1
        self._lower += change < 0
        self._higher += change > 0
        self._fell.pop(task, None)
        if chance_of_fall(before, now) <= FALL:
            self._deep += 1
            self._fell[task] = f"{task} ({before[0]} of {before[1]}, then {now[0]} of {now[1]})"

    def facts(self) -> list[tuple[str, str]]:
        """(name, value), for people; empty: nothing was drawn by a curriculum."""
        tasks = Counter(self._pool_of.values())
        facts = [
            (f"pool: {pool}", f"{tasks[pool]} tasks, drawn {drawn} times, {self._informative[pool]} informative")
            for pool, drawn in self._drawn.most_common()
        ]
        if self._scored:
            facts.append(
                ("solved at re-tests", f"{self._solved / self._scored:.1%}; there all tasks weigh the same")
            )
        if self._compared:
            level = f"{self._compared} compared: {self._lower} lower, {self._higher} higher than the one before"
            chance = f"chance brings {FALL * self._compared:.0f} at most"
            facts.append(("re-tests", f"{level}; {self._deep} much lower, {chance}"))
        return facts

    def warnings(self) -> list[str]:
        """What chance does not explain."""
        deep = at_least(self._deep, self._compared, FALL)
        lower = at_least(self._lower, self._lower + self._higher, 0.5)
        if min(deep, lower) > TOLD:
            return []
        named = ", ".join(list(self._fell.values())[-MOST_NAMED:])
        return [
            "tasks that were solved before are failed now: the policy forgets, or fails on purpose to be given "
            f"others. Of {self._compared} re-tests {self._lower} are lower than the one before and {self._higher} "
            f"higher (by chance: {lower:.1g}), {self._deep} much lower (by chance: {deep:.1g})"
            + (f": {named}" if named else "")
        ]
