"""Where a run is in its stream of tasks: which groups are done, and which of those the trainer has taken.

`position_files` writes it.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Sending:
    """A delivery that was begun, and by what to find out later whether it arrived.

    `number`: of the group; `lines`: how many it has, side lines included; `fingerprint`: of its last line.
    `env_id` and `name`: our registration. `step` (the trainer's) and `queued` (groups of ours that waited in the
    run-api) are from before the delivery.
    """

    number: int
    lines: int
    fingerprint: str
    env_id: int
    name: str
    step: int
    queued: int


@dataclass(frozen=True, slots=True)
class Position:
    """`following`: all groups with smaller numbers are done; `done`: larger numbers of done groups. `groups`: how
    many done groups the trainer was given. `step`: the trainer's. `sending`: the delivery under way. The seed
    makes the remaining groups the same."""

    seed: int
    dataset: str
    step: int = 0
    following: int = 0
    done: frozenset[int] = frozenset()
    groups: int = 0
    sending: Sending | None = None

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "done": sorted(self.done)}


@dataclass(slots=True)
class Ledger:
    """What became of each group. The run-api makes batches of deliveries in their order.

    `sending`: a delivery of which it is not known yet whether it arrived; at first that of an earlier process.
    """

    begun: Position
    sending: Sending | None = None
    delivered: int = 0  # groups handed over by this process, side lines counted with their group
    lost: int = 0  # groups that the run-api lost before the trainer took them
    _posted: int = 0  # lines handed over, side lines included
    _taken: int = 0
    _queued: deque[int] = field(default_factory=deque)  # group number of each line not taken, oldest first
    _untaken: Counter[int] = field(default_factory=Counter)  # lines not taken, by group number
    _formed: list[int] = field(default_factory=list)  # group number of each line that may wait in a whole batch
    _following: int = 0
    _above: set[int] = field(default_factory=set)  # done groups above a gap

    def __post_init__(self) -> None:
        self.begin(self.begun)

    def begin(self, position: Position) -> None:
        """Goes on from `position`. Only before anything is delivered."""
        self.begun = position
        self._following, self._above = position.following, set(position.done)
        self.sending = position.sending

    @property
    def posted(self) -> int:
        """How many lines were handed over by now: a mark for `seen_queue`."""
        return self._posted

    @property
    def groups(self) -> int:
        """How many groups the trainer was given, by earlier processes too, without lost ones."""
        return self.begun.groups + self.delivered - self.lost

    def is_done(self, number: int) -> bool:
        """Whether this group does not come again."""
        return number < self._following or number in self._above

    def deliver(self, number: int, lines: int) -> None:
        """The run-api has the group."""
        self.drop(number)
        self.delivered += 1
        self._posted += lines
        self._queued.extend([number] * lines)
        self._untaken[number] += lines

    def drop(self, number: int) -> None:
        """The group is done: it does not come again."""
        if self.sending is not None and self.sending.number == number:
            self.sending = None
        self._above.add(number)
        while self._following in self._above:
            self._above.remove(self._following)
            self._following += 1

    def seen_queue(self, size: int, posted: int, formed: int, batch: int) -> None:
        """Of the `posted` lines handed over before the run-api was asked, `size` are still in its queue. `formed`:
        how many batches it has formed since it was last asked; `batch`: how many lines of ours one holds at most.

        The run-api forms batches when it has none left, of all that its queue holds, and gives the last one out
        first. So nothing tells whether the others were fetched until it forms new ones.
        """
        left = []
        while self._taken < posted - size and self._queued:
            self._taken += 1
            left.append(self._queued.popleft())
            self._take(left[-1])
        if formed:
            self._formed = left[: (formed - 1) * batch]

    def forgotten(self) -> int:
        """The run-api lost what waited in it. Returns how many groups at most; they do not come again."""
        gone = len(self._untaken.keys() | set(self._formed))
        self.lost += gone
        self._taken += len(self._queued)
        self._queued.clear()
        self._untaken.clear()
        self._formed.clear()
        return gone

    def delivered_position(self, step: int) -> Position:
        """Everything handed over counts as done."""
        return replace(self._position(step, self._following, self._above, self.groups), sending=self.sending)

    def taken_position(self, step: int) -> Position:
        """Only what has left the run-api's queue counts as done: its steps count so, too."""
        waiting = set(self._untaken)
        following = min(waiting | {self._following})
        done = {*range(following, self._following), *self._above} - waiting
        return self._position(step, following, done, self.groups - len(waiting))

    def _take(self, number: int) -> None:
        self._untaken[number] -= 1
        if not self._untaken[number]:
            del self._untaken[number]

    def _position(self, step: int, following: int, done: Iterable[int], groups: int) -> Position:
        begun = self.begun
        return Position(begun.seed, begun.dataset, step, following, frozenset(done), groups)
