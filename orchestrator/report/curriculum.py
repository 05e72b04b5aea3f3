"""What a curriculum drew, pool by pool, and whether tasks are failed that were solved before.

When a task is tested again follows from no score. While a policy is as good at it as it was, its re-tests are as
likely in any order, and while it learns a fall is less likely. So more falls than chance brings are a policy that
forgets, or one that fails on purpose to be given other tasks.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from orchestrator.rules.estimates import at_least, chance_of_fall
from orchestrator.run.lenient import count, text

MOST_TASKS = 100_000  # that are compared
MOST_RETESTS = 256  # of one task: the last ones
MOST_SCORED = 1024  # rollouts of one group
MOST_NAMED = 10
MOST_TURNS = 1_000  # at which groups began
FALL = 0.05  # a task fell if chance brings that no more often
TOLD = 0.001  # falls are warned of if chance brings so many no more often


@dataclass(frozen=True, slots=True)
class _Fall:
    """Of one task. `possible`: with as many solved rollouts in another order it could have fallen. `missing`:
    solved rollouts that the later half of its re-tests lacks; and their variance, if all orders are as likely."""

    possible: bool = False
    fell: str = ""
    missing: float = 0.0
    variance: float = 0.0


class Curriculum:
    """Takes the lines of curriculum.jsonl in their order."""

    def __init__(self) -> None:
        self._pool_of: dict[str, str] = {}  # as it was last drawn
        self._drawn: Counter[str] = Counter()
        self._informative: Counter[str] = Counter()
        self._retests: dict[str, list[tuple[int, int]]] = {}  # solved, scored
        self._falls: dict[str, _Fall] = {}
        self._solved = self._scored = 0  # of all re-tests
        self._begun: Counter[int] = Counter()  # scored rollouts, by the turn at which their group began

    def take(self, line: dict[str, Any]) -> None:
        task, pool = text(line.get("task_id"), 200), text(line.get("pool"), 20)
        solved, scored = count(line.get("solved")), count(line.get("scored"))
        if (turn := count(line.get("turn"))) and scored <= MOST_SCORED and len(self._begun) < MOST_TURNS:
            self._begun[turn] += scored
        known = task in self._pool_of or len(self._pool_of) < MOST_TASKS
        if not pool or not known or not solved <= scored <= MOST_SCORED:
            return
        self._pool_of[task] = pool
        self._drawn[pool] += 1
        self._informative[pool] += line.get("differ") is True
        if scored and line.get("retest") is True:
            self._solved += solved
            self._scored += scored
            retests = self._retests.setdefault(task, [])
            retests.append((solved, scored))
            del retests[:-MOST_RETESTS]
            if len(retests) > 1:
                self._falls[task] = _fall(task, retests)

    def facts(self) -> list[tuple[str, str]]:
        """(name, value), for people; empty: nothing was drawn by a curriculum."""
        tasks = Counter(self._pool_of.values())
        facts = [
            (f"pool: {pool}", f"{tasks[pool]} tasks, drawn {drawn} times, {self._informative[pool]} informative")
            for pool, drawn in self._drawn.most_common()
        ]
        if self._begun:
            each = sorted(self._begun.items(), reverse=True)
            facts.append(("rollouts begun at", ", ".join(f"turn {turn}: {scored}" for turn, scored in each)))
        if self._scored:
            facts.append(
                ("solved at re-tests", f"{self._solved / self._scored:.1%}; there all tasks weigh the same")
            )
        if self._falls:
            fell, possible = self._counts()
            facts.append(("re-tests", f"{fell} tasks fell; chance brings {FALL * possible:.1f} at most"))
        return facts

    def warnings(self) -> list[str]:
        """What chance does not explain."""
        fell, possible = self._counts()
        falls = self._falls.values()
        missing, variance = sum(fall.missing for fall in falls), sum(fall.variance for fall in falls)
        # Mantel and Haenszel's test: small falls of many tasks.
        together = math.erfc(missing / math.sqrt(2 * variance)) / 2 if variance else 1.0
        if min(each := at_least(fell, possible, FALL), together) > TOLD:
            return []
        named = [fall.fell for fall in falls if fall.fell]
        return [
            "tasks that were solved before are failed now: the policy forgets, or fails on purpose to be given "
            f"others. {fell} tasks fell (chance of so many: {each:.1g}), the later halves of all re-tests lack "
            f"{missing:.1f} solved rollouts (chance: {together:.1g}). {'; '.join(named[:MOST_NAMED])}".rstrip()
        ]

    def _counts(self) -> tuple[int, int]:
        """(tasks that fell, tasks that could have)."""
        falls = self._falls.values()
        return sum(bool(fall.fell) for fall in falls), sum(fall.possible for fall in falls)


def _fall(task: str, retests: list[tuple[int, int]]) -> _Fall:
    """Compares the halves of all re-tests, of the last half of them, and so on: a task may have been learned
    before it was failed."""
    lengths = [len(retests) >> level for level in range(len(retests).bit_length() - 1)]
    possible, fell, limit = False, "", FALL / len(lengths)
    for length in lengths:
        (a, m), (b, n) = (_sum(half) for half in _halves(retests[-length:]))
        least = max(0, a + b - m)
        possible |= chance_of_fall((a + b - least, m), (least, n)) <= limit
        if not fell and chance_of_fall((a, m), (b, n)) <= limit:
            fell = f"{task}: {a} of {m}, then {b} of {n}"
    (a, m), (b, n) = (_sum(half) for half in _halves(retests))
    solved, scored = a + b, m + n
    variance = m * n * solved * (scored - solved) / (scored**2 * (scored - 1))
    return _Fall(possible, fell, n * solved / scored - b, variance)


def _halves(retests: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    middle = len(retests) // 2
    return retests[:middle], retests[middle:]


def _sum(retests: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(solved for solved, _ in retests), sum(scored for _, scored in retests)
