"""`env.curriculum pools`: which tasks a round through the data set has, by what became of them before. Pure.

New and mixed tasks are in every round. An easy or hopeless one is in one of RETEST_EVERY rounds, which a hash of
seed and task names: re-tests come when they come, whatever was scored. What a round has follows from the seed, its
number, and the results of all groups but the last `lag` before it, in the order of their numbers. So a resumed run
decides what it decided before, and groups that are slow hold up no round that they are not to decide.
"""

import hashlib
from asyncio import Event
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from orchestrator.types import Group

RETEST_EVERY = 8  # rounds
KEPT = 0.5  # of what earlier groups count when another comes: a policy learns and forgets
EDGE = 1 / 8  # below this pass rate a task is hopeless, above the rest easy

Pool = Literal["new", "mixed", "easy", "hopeless"]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one group says of its task. `scored`: its rollouts with a score, and no others: infrastructure fails no
    task; `solved`: of these; `differ`: whether their scores do. `turn`: where they began, from 1 on; those that
    began elsewhere are not counted. 0: all are."""

    task_id: str = ""
    scored: int = 0
    solved: int = 0
    differ: bool = False
    turn: int = 0

    @classmethod
    def of(cls, group: Group, turn: int = 0) -> Self:
        """Of a group that is over, dropped or not."""
        begun = [(member.attempt.record.branch, member.score) for member in group.members_G]
        scores = [score for branch, score in begun if turn in (0, branch.turn if branch else 1)]
        solved = sum(score.solved for score in scores)
        return cls(group.task.task_id, len(scores), solved, len({score.value for score in scores}) > 1, turn)


NOTHING = GroupResult()


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a round has a task. `retest`: it would have it whatever was scored."""

    round: int
    pool: Pool
    retest: bool


@dataclass(slots=True)
class _Standing:
    """Of one task, by its groups so far."""

    scored: float = 0.0
    solved: float = 0.0
    differ: bool = False

    def take(self, result: GroupResult) -> None:
        self.scored = KEPT * self.scored + result.scored
        self.solved = KEPT * self.solved + result.solved
        self.differ = result.differ

    @property
    def pool(self) -> Pool:
        """By the mean of the pass rate's distribution, under Jeffreys' prior. Where the last scores differed there
        is something to learn, whatever the rate."""
        rate = (self.solved + 0.5) / (self.scored + 1.0)
        if self.differ or EDGE <= rate <= 1.0 - EDGE:
            return "mixed"
        return "easy" if rate > 0.5 else "hopeless"


class Pools:
    """The tasks' standings, and the results that are not counted yet. Draws ask it in their thread, groups tell it
    in another: neither takes the other's results away, and one call at a time draws.

    `news`: set when a result has come.
    """

    def __init__(self, seed: Callable[[], int], lag: int = 0) -> None:
        self.lag = lag
        self.news = Event()
        self._seed = seed
        self._results: dict[int, GroupResult] = {}  # not counted yet
        self._counted = 0  # results of groups below this number are in the standings
        self._following = 0  # number of the next draw
        self._round = -1
        self._standings: dict[str, _Standing] = {}
        self._choices: dict[int, Choice] = {}  # of groups without a result

    def resume(self, lag: int, results: Mapping[int, GroupResult]) -> None:
        """Goes on with an earlier process' run. Only before the first draw."""
        self.lag, self._results = lag, dict(results)

    def begin_round(self, gone: Callable[[int], bool]) -> bool:
        """Begins the next round; False: it waits for results. `gone`: groups of which none comes."""
        while self._counted < self._following - self.lag:
            result = self._results.get(self._counted)
            if result is None and not gone(self._counted):
                return False
            if result is not None and result.scored:
                self._standings.setdefault(result.task_id, _Standing()).take(result)
            self._counted += 1  # first, so that `has` never misses it
            self._results.pop(self._counted - 1, None)
        self._round += 1
        return True

    def takes(self, task_id: str) -> bool:
        """Whether this round has the task."""
        choice = self._choice(task_id)
        return choice.retest or choice.pool == "mixed"

    def drawn(self, number: int, task_id: str | None) -> None:
        """A group of this number is made next. None: of no task that can be used."""
        self._following = number + 1
        if task_id is None:
            self._results[number] = NOTHING
        elif not self.has(number):
            self._choices[number] = self._choice(task_id)

    def has(self, number: int) -> bool:
        """Whether the group's result is known: the first one counts."""
        return number in self._results or number < self._counted

    def choice(self, number: int) -> Choice | None:
        """Why the group was drawn; None: its result is known, or it was not drawn here."""
        return self._choices.get(number)

    def settle(self, number: int, result: GroupResult) -> None:
        """The group is over."""
        self._choices.pop(number, None)
        if not self.has(number):
            self._results[number] = result
        self.news.set()

    def give_up(self) -> None:
        """No further result comes of what was drawn."""
        for number in list(self._choices):
            self.settle(number, NOTHING)

    def _choice(self, task_id: str) -> Choice:
        standing = self._standings.get(task_id)
        text = f"{self._seed()}\0{task_id}".encode("utf-8", "surrogatepass")
        turn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % RETEST_EVERY
        pool: Pool = "new" if standing is None else standing.pool
        return Choice(self._round, pool, pool == "new" or self._round % RETEST_EVERY == turn)
