"""Finds groups in an index: by words, by a filter, in an order. Where the page has all rows it does so itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from orchestrator.report.index import RunIndex
from orchestrator.run.frames import unsqueezed

_SORTS = {"": "number", "group": "number", "drawn again": "draws"} | {
    name: name
    for name in ("task", "level", "source", "scores", "mean", "spread", "outcomes", "tokens", "seconds", "cost")
}
_KINDS = {"": "1", "dropped": "NOT written"} | {
    kind: f'"{kind}"' for kind in ("mixed", "divided", "wrong", "right", "written")
}
_AT_ONCE = 2000  # texts that are searched before others have their turn
_MOST_WORDS, _MOST_CHARS = 20, 500
_KEPT = 8  # orders that were asked for last
_PAUSES = 100  # an order of a run that goes on is made anew after so many times as long as it took


@dataclass(frozen=True, slots=True)
class Query:
    """As the page's address has it. `words`: all of them are somewhere in the group."""

    words: tuple[str, ...] = ()
    kind: str = ""
    outcome: str = ""
    sort: str = ""
    is_down: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """Raises ValueError for a filter or an order that there is not."""
        kind, sort = given.get("which", ""), given.get("sort", "")
        if kind not in _KINDS or sort not in _SORTS:
            raise ValueError("which and sort: those that the page has")
        words = given.get("search", "")[:_MOST_CHARS].lower().split()[:_MOST_WORDS]
        return cls(tuple(dict.fromkeys(words)), kind, given.get("outcome", ""), sort, given.get("down") == "1")


class Search:
    """Orders of groups. `turn`: held while the index is used, and given up for a moment every so many texts."""

    def __init__(self, index: RunIndex, turn: AbstractContextManager[Any]) -> None:
        self._index, self._turn = index, turn
        self._orders: dict[
            Query, tuple[int, float, list[int]]
        ] = {}  # version, until when it may be older, numbers

    def order(self, query: Query) -> list[int]:
        """The numbers of the groups that fit, in their order."""
        version, until, numbers = self._orders.get(query, (-1, 0.0, []))
        if version == self._index.version or time.monotonic() < until:
            return numbers
        began, version = time.monotonic(), self._index.version
        numbers = self._made(query)
        until = began + (1 + _PAUSES) * (time.monotonic() - began)
        self._orders.pop(query, None)
        self._orders[query] = version, until, numbers
        if len(self._orders) > _KEPT:
            del self._orders[next(iter(self._orders))]
        return numbers

    def _made(self, query: Query) -> list[int]:
        column, way = _SORTS[query.sort], "DESC" if query.is_down else "ASC"
        outcome = "" if not query.outcome else "AND instr(has, char(10) || ? || char(10))"
        # Unknown values come last in both directions.
        select = f"SELECT number FROM found WHERE {_KINDS[query.kind]} {outcome} "
        order = f"ORDER BY {column} IS NULL, {column} {way}, number"
        with self._turn:
            given = (query.outcome,) if query.outcome else ()
            numbers = [number for (number,) in self._index.tables.database.execute(select + order, given)]
        if not query.words:
            return numbers
        fitting = self._with(query.words, set(numbers))
        return [number for number in numbers if number in fitting]

    def _with(self, words: tuple[str, ...], among: set[int]) -> set[int]:
        """Which of the groups have all words: in their texts and transcripts together."""
        sought = [word.encode("utf-8", "replace") for word in words]
        missing = dict.fromkeys(among, sought)
        for table, key in (("texts", "number"), ("said", "rowid")):
            last = -1
            while missing:
                with self._turn:
                    select = (
                        f"SELECT {key}, number, text FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT {_AT_ONCE}"
                    )
                    rows = self._index.tables.database.execute(select, (last,)).fetchall()
                    if not rows:
                        break
                    last = rows[-1][0]
                    for _, number, packed in rows:
                        if left := missing.get(number):
                            text = unsqueezed(packed)
                            missing[number] = [word for word in left if word not in text]
        return {number for number, left in missing.items() if not left}
