"""`env.start_at`: hard tasks begin near their end, at turn k of a rollout of an earlier run that solved them.

Of each task that run solved, one solved rollout is the way: the shortest by turns, of these the first by its id.
At first its last turn is sampled anew. Each group that begins at its task's k, and of whose scored rollouts at
least half solve it, makes k one less, until the task begins whole. One half, as there scores differ most within a
group: with less the k before would be too hard, with more sampling goes on where little is left to learn.

The k of a group follows from the results of its task's groups that come at least `lag` numbers before it, in the
order of their numbers; it waits for those under way. So a resumed run begins its groups where it began them
before, and what is fast or slow decides nothing. docs/branching.md argues why no policy gains by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

from orchestrator.engine.group import Unfinished
from orchestrator.engine.same_ids import same_ids
from orchestrator.engine.shared import Shared
from orchestrator.errors import ConfigError
from orchestrator.rules.pools import GroupResult
from orchestrator.rules.waits import first_of
from orchestrator.run.files import is_going_on, read_recorded
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import text_at, texts
from orchestrator.run.parent import digest_in
from orchestrator.settings.config import Config
from orchestrator.settings.saved import SavedSettings
from orchestrator.types import Prefix, Task
from orchestrator.types.prefix import branching

_HERE = "env.start_at"
_AGENT = "Agent"  # the group of settings that prompts follow from


@dataclass(frozen=True, slots=True)
class Way:
    """A solved rollout: how many turns it has, its id, and where its line begins."""

    turns: int
    rollout_id: str
    offset: int


class Starts:
    """Where the groups of each task begin. `lag`: a result counts for groups that come so many numbers later."""

    def __init__(self, record: Path, described: Mapping[str, Any], ways: Mapping[str, Way], back: int) -> None:
        self.lag = 0
        self._record, self._described, self._ways, self._back = record, described, ways, back
        self._results: dict[str, dict[int, GroupResult]] = {}  # by task and group, of groups that had a prefix
        self._settled: set[int] = set()
        self._under_way: dict[str, set[int]] = {}
        self._news = asyncio.Event()

    @classmethod
    def read(cls, config: Config) -> Starts:
        """Of the run that `env.start_at` names. Blocks. Raises ConfigError."""
        directory, back = config.env.start_run
        described, record = read_recorded(directory, _HERE)
        if is_going_on(directory):
            raise ConfigError(f"{_HERE}: the run in {directory} is under way: its record still grows")
        _demand_agent(SavedSettings.read(directory, _HERE), config)
        ways: dict[str, Way] = {}
        for line in texts(record):
            try:
                attempt = read_attempt(line.text)
            except ValueError:
                continue  # a bad task, or what a killed run left
            if attempt.score is None or not attempt.score.solved or not _can_begin_anywhere(attempt):
                continue
            way = Way(len(attempt.record.turns), attempt.rollout_id, line.offset)
            known = ways.get(attempt.task_id)
            if known is None or (way.turns, way.rollout_id) < (known.turns, known.rollout_id):
                ways[attempt.task_id] = way
        if not ways:
            raise ConfigError(f"{_HERE}: the run in {directory} has no solved rollout to begin in")
        return cls(record, described, ways, back)

    @property
    def digest(self) -> str:
        """Of where tasks may begin, for run.json."""
        each = sorted((task, way.turns, way.rollout_id) for task, way in self._ways.items())
        return blake2b(repr(each).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def demand_agent(self, agent: object) -> None:
        """Raises ConfigError where the run's agent, as run.json describes it, is not the earlier one's."""
        if self._described.get("agent") != agent:
            raise ConfigError(
                f"{_HERE}: the agent's program, prompts, tools or form of calls are not those of "
                f"{self._record.parent}"
            )

    def resume(self, lag: int, results: Mapping[int, GroupResult]) -> None:
        """Goes on with an earlier process' run. Only before the first group."""
        self.lag = lag
        for number, result in results.items():
            self._take(number, result)

    async def begin(self, shared: Shared, task: Task, number: int) -> Prefix | None:
        """The beginning of the rollouts of this group; None: the task's. Raises Unfinished after `drain`."""
        way = self._ways.get(task.task_id)
        if way is None:
            return None
        under_way = self._under_way.setdefault(task.task_id, set())
        under_way.add(number)
        stopping = shared.stopping
        while any(other < number - self.lag for other in under_way):
            self._news.clear()
            await first_of(self._news.wait(), stopping.wait())
            if stopping.is_set():
                raise Unfinished
        turn = self._turn(task.task_id, way, number)
        return None if turn == 1 else await asyncio.to_thread(self._prefix, shared, way, turn)

    def leave(self, task: Task, number: int) -> None:
        """The group is over, or is not made any more."""
        self._under_way.get(task.task_id, set()).discard(number)
        self._news.set()

    def has(self, number: int) -> bool:
        """Whether the group's result is known: the first one counts."""
        return number in self._settled

    def settle(self, number: int, result: GroupResult) -> None:
        """The group's rollouts are over."""
        if not self.has(number):
            self._take(number, result)

    def _take(self, number: int, result: GroupResult) -> None:
        self._settled.add(number)
        if result.turn > 1:
            self._results.setdefault(result.task_id, {})[number] = result

    def _turn(self, task_id: str, way: Way, number: int) -> int:
        turn = max(1, way.turns + 1 - self._back)
        for other, result in sorted(self._results.get(task_id, {}).items()):
            if other < number - self.lag and result.turn == turn and 2 * result.solved >= result.scored > 0:
                turn -= 1
        return turn

    def _prefix(self, shared: Shared, way: Way, turn: int) -> Prefix:
        try:
            attempt = read_attempt(text_at(self._record, way.offset))
            if attempt.rollout_id != way.rollout_id:
                raise ValueError("it is not the file that it was")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{_HERE}: {self._record} cannot be read any more: {error}") from error
        turns = attempt.record.turns
        same = same_ids(turns[: turn - 1], digest_in(self._described), shared.open_now.hosts)
        return branching(way.rollout_id, attempt.record, turn, same_ids=same, run=str(self._record.parent))


def _can_begin_anywhere(attempt: RecordedAttempt) -> bool:
    """Whether each of its turns was asked for behind the one before."""
    turns = attempt.record.turns
    try:
        branching(attempt.rollout_id, attempt.record, len(turns))
    except ValueError:
        return False
    ends = accumulate((turn.ended_s for turn in turns), max)
    return all(ended_s <= following.started_s for ended_s, following in zip(ends, turns[1:], strict=False))


def _demand_agent(saved: SavedSettings, config: Config) -> None:
    """Raises ConfigError where settings differ that prompts follow from."""
    rows = [row for row in config.env.rows().values() if row.group == _AGENT and row.key in saved.env]
    differ = [row.key for row in rows if saved.env[row.key].value != getattr(config.env, row.name)]
    if differ:
        raise ConfigError(f"{_HERE}: the run in {saved.directory} has another agent: {', '.join(differ)} differ")
