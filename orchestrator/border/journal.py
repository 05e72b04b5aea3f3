"""What one rollout asked of its border, and how much of it is left to be asked."""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from orchestrator.rules.egress import Place, Refused
from orchestrator.rules.text import one_line
from orchestrator.types import Crossing

_TEXT_BYTES = 16 << 20  # of addresses and headers together
_HEADERS_BYTES = 8 << 10  # of one answer
_SHORT_CHARS = 200
Headers = tuple[tuple[str, str], ...]


class Journal:
    """`requests`, `size`: that the rollout may have; `size` in bytes of all that passes, both ways. `added`: is
    told of each entry when it has ended. `elapsed_s`: seconds of the rollout so far; of this journal, until who
    knows them is put in its place."""

    def __init__(self, requests: int, size: int, added: Callable[[Crossing], None] | None = None) -> None:
        began_s = monotonic()
        self.elapsed_s: Callable[[], float] = lambda: monotonic() - began_s
        self._added = added
        self._most, self._size = requests, size
        self._begun = self._asked = self._passed = self._text = 0
        self._crossings = dict[int, Crossing]()
        self.left_out = 0
        """Requests that are not on record: they came after the last that the rollout may have."""

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        return tuple(self._crossings[number] for number in sorted(self._crossings))

    def begin(self, method: str, scheme: str, place: Place | None, target: str = "") -> Crossing:
        """A new entry, for `end`. `place`: None: nobody can say where it leads."""
        self._begun += 1
        self._asked += 1
        host, port = (place.host, place.port) if place else ("", 0)
        now = self.elapsed_s()
        return Crossing(self._begun, now, now, one_line(method)[:24], scheme, host, port, target)

    def forget(self) -> None:
        """An entry that was begun is none: a tunnel was opened whose requests are looked at one by one."""
        self._asked -= 1

    def demand_room(self) -> None:
        """Raises Refused: the rollout may ask nothing more. The last one that it may ask has begun."""
        if self._asked > self._most:
            raise Refused(f"more than {self._most} requests: the limit of one rollout", 429)
        self.count(0)

    def count(self, size: int) -> None:
        """So many bytes pass. Raises Refused: no more may."""
        self._passed += size
        if self._passed > self._size:
            raise Refused(f"more than {self._size} bytes, both ways: the limit of one rollout", 429)

    def end(self, crossing: Crossing, **facts: Any) -> Crossing:
        """Puts an entry on record, shortened where the record has no room for more. Returns all of it."""
        if facts.get("refusal"):
            facts["refusal"] = one_line(facts["refusal"])
        ended = replace(crossing, ended_s=self.elapsed_s(), **facts)
        if len(self._crossings) > self._most:
            self.left_out += 1
            return ended
        size, kept = len(ended.target) + sum(len(name) + len(value) for name, value in ended.headers), ended
        if self._text + size > _TEXT_BYTES:
            kept = replace(ended, target=ended.target[:_SHORT_CHARS], headers=())
        else:
            self._text += size
        self._crossings[kept.sequence] = kept
        if self._added is not None:
            self._added(kept)
        return ended


def bounded(headers: list[tuple[str, str]]) -> Headers:
    """As many of an answer's headers as are put on record."""
    kept, size = [], 0
    for name, value in headers:
        size += len(name) + len(value)
        if size > _HEADERS_BYTES:
            break
        kept.append((name, value))
    return tuple(kept)
