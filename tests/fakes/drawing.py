"""A run as its curriculum sees it: draws, and results that come in any order. No engine, so it takes no time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from orchestrator.engine.draws import Draw, Draws, Pause
from orchestrator.report.curriculum import Curriculum
from orchestrator.rules.pools import GroupResult, Pools
from orchestrator.run.line import result_line
from orchestrator.types import Task

Skill = Callable[[str, int], float]  # the chance to solve a task that was drawn so often before
GROUP = 4


def tasks(count: int) -> list[Task]:
    return [Task(f"q{n}", "?", "42") for n in range(count)]


def quarters(task: str, drawn: int) -> float:
    """Half of the tasks are hopeless, a quarter is easy."""
    return (0.0, 1.0, 0.5, 0.0)[int(task[1:]) % 4]


class Drawing:
    """Groups under way end in an order that `order` chooses. `journal`: what would be on disk; `report`: of it."""

    def __init__(
        self, rows: list[Task], skill: Skill, lag: int, open_groups: int, order: random.Random, seed: int = 7
    ) -> None:
        self.pools = Pools(lambda: seed, lag)
        self.draws = Draws(lambda task: task, pools=self.pools)
        self.journal: dict[int, GroupResult] = {}
        self.made: list[Draw] = []
        self.report = Curriculum()
        self._skill, self._rows, self._open, self._order, self._seed = skill, rows, open_groups, order, seed
        self._times = Counter[str]()
        self._before: dict[int, int] = {}

    def run(self, wanted: int, killed_at: float = float("inf")) -> list[Draw]:
        """What was drawn; until so many results were there."""
        under_way: list[Draw] = []
        for draw in self.draws.several(self._rows, wanted, epoch=None, rounds=True):
            if isinstance(draw, Draw):
                self.made.append(draw)
                under_way.append(draw)
                self._before[draw.number] = self._times[draw.task.task_id]
                self._times[draw.task.task_id] += 1
            while under_way and (isinstance(draw, Pause) or len(under_way) >= self._open):
                if len(self.journal) >= killed_at:
                    return self.made
                self._end(under_way.pop(self._order.randrange(len(under_way))))
                if isinstance(draw, Pause):
                    break
        return self.made

    def _end(self, draw: Draw) -> None:
        if self.pools.has(draw.number):
            return
        result = self.journal[draw.number] = self._result(draw)
        self.report.take(result_line(draw.number, result, self.pools.choice(draw.number)))
        self.pools.settle(draw.number, result)

    def _result(self, draw: Draw) -> GroupResult:
        """The same for the same draw, whenever its group ends."""
        chance = random.Random(f"{self._seed} {draw.task.task_id} {draw.epoch}")
        able = self._skill(draw.task.task_id, self._before[draw.number])
        solved = sum(chance.random() < able for _ in range(GROUP))
        return GroupResult(draw.task.task_id, GROUP, solved, 0 < solved < GROUP)


def told(draws: list[Draw]) -> list[tuple[str, int, int]]:
    return [(draw.task.task_id, draw.number, draw.epoch) for draw in draws]
