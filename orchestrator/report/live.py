"""The report of a run that goes on, or of a long one: the same page, which asks a server for what it shows.

All is read from the index of the run (`index`), which first takes what is new.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from orchestrator.completion.base import Tokenizer
from orchestrator.report.details import TokenTable, rollout_details
from orchestrator.report.index import RunIndex
from orchestrator.report.page import document
from orchestrator.report.reader import MOST_ATTEMPTS
from orchestrator.report.rows import group_row, question_of, rollout_row
from orchestrator.report.search import Query, Search
from orchestrator.run.files import groups_file_of, groups_in, is_going_on, read_description, record_of
from orchestrator.run.lenient import read_at
from orchestrator.run.prices import NO_PRICES, PriceList
from orchestrator.run.under_way import served_so_far
from orchestrator.types import Record

STEP_S = 0.5  # at most, for one request, of reading what is new
MOST_GROUPS = 2000  # of one answer
_ENDED_AT_ONCE = 5000
_MOST_TURNS = 200  # of a rollout under way: the last ones


class LiveReport:
    """The methods block, and may be called from any threads. `tokenizer`: the run's, once there is one."""

    def __init__(
        self,
        run_directory: Path,
        tokenizer: Callable[[], Tokenizer | None],
        price_list: PriceList = NO_PRICES,
    ) -> None:
        """Raises OSError, sqlite3.Error, ConfigError."""
        self._directory = run_directory
        self._tokenizer = tokenizer
        self._turn = Lock()
        self._index = RunIndex(run_directory, price_list)
        self._search = Search(self._index, self._turn)
        self._whole: tuple[int, dict[str, Any]] = -1, {}

    def close(self) -> None:
        with self._turn:
            self._index.close()

    def page(self) -> bytes:
        """The HTML."""
        return document([("live", b"{}")], live=True)

    def read(self, told: Callable[[float], None]) -> None:
        """Reads all there is. `told`: is given the share that was read. Raises OSError, sqlite3.Error."""
        while not self._index.read(STEP_S, told):
            pass

    def update(self, began: float = 0.0) -> dict[str, Any]:
        """The run as a whole, as it is now. `behind`: there is more to read. `finished`: groups that were begun
        since then, Unix seconds."""
        with self._turn:
            behind = not self._index.read(STEP_S)
            if self._whole[0] != self._index.version:
                self._whole = self._index.version, self._counts(began)
            self._index.tables.forget()
            return {
                **self._index.overview(),
                **self._whole[1],
                "version": self._index.version,
                "behind": behind,
                "going_on": is_going_on(self._directory),
                "most": MOST_ATTEMPTS,
            }

    def ended(self, after: int) -> dict[str, Any]:
        """Attempts that ended or changed since the last one that the page has, some of them at a time; of very
        many, the last. `last`: what to ask for next; `more`: whether there are more now."""
        with self._turn:
            database = self._index.tables.database
            (newest,) = database.execute("SELECT ifnull(max(seq), 0) FROM ended").fetchone()
            first = max(after, newest - MOST_ATTEMPTS)
            select = f"SELECT seq, row FROM ended WHERE seq > ? ORDER BY seq LIMIT {_ENDED_AT_ONCE}"
            rows = database.execute(select, (first,)).fetchall()
        last = rows[-1][0] if rows else newest
        return {"rows": [orjson.Fragment(row) for _, row in rows], "last": last, "more": last < newest}

    def groups(self, given: Mapping[str, str], first: int, most: int) -> dict[str, Any]:
        """A part of the table of groups, with all their attempts. Raises ValueError."""
        numbers = self._search.order(Query.of(given))
        with self._turn:
            shown = numbers[first : first + min(most, MOST_GROUPS)]
            return {**self._rows(shown), "count": len(numbers)}

    def group(
        self, given: Mapping[str, str], number: int | None, rollout: str, line: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One group with its attempts and its neighbours in the table, by its number or one of its rollouts;
        without content where there is none. `line`: of that rollout, so far, which may not have ended. Raises
        ValueError."""
        with self._turn:
            run = self._index.run
            if rollout in run.rollouts:
                number, line = run.rollouts[rollout]["group"], None
            elif line is not None:
                number = line["group"]
            there = number is not None and number in run.groups
            rows = self._rows([number] if there and number is not None else [])
        if line is not None:
            if not there:
                rows["groups"].append({**group_row(line, line["group"]), "question": question_of(line)})
            row = rollout_row(line, rollout, line["group"])
            rows["rollouts"].append({**row, "outcome": "under way", "cost": None, "running": True})
        if not there or number is None:
            return rows
        numbers = self._search.order(Query.of(given))
        if number not in numbers:
            numbers = self._search.order(Query())
        place = numbers.index(number) if number in numbers else None
        before = numbers[place - 1] if place else None
        after = numbers[place + 1] if place is not None and place + 1 < len(numbers) else None
        return {**rows, "before": before, "after": after}

    def details(self, rollout_id: str, line: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """One rollout step by step, with its tokens; None: there is no such one. `line`: so far, of one that may
        not have ended."""
        with self._turn:
            run = self._index.run
            place, written = run.places.get(rollout_id), run.written.get(rollout_id)
            self._index.tables.forget()
        record = record_of(self._directory)
        if place is None or record is None:
            return None if line is None else {**rollout_details(_last_turns(line)), "tokens": None}
        groups_file = groups_in(self._directory, groups_file_of(read_description(self._directory)))
        group = read_at(groups_file, written[0]) if written is not None and groups_file is not None else {}
        table = TokenTable(self._tokenizer())
        tokens = table.member(group, written[1]) if written is not None else None
        shown = None if tokens is None else {**tokens, "entries": table.entries}
        return {**rollout_details(read_at(record, place)), "tokens": shown}

    def served(self, rollout_id: str) -> Record | None:
        """What a rollout under way on another machine was served so far. None: nothing that is known here."""
        return served_so_far(self._directory, rollout_id)

    def _rows(self, numbers: Sequence[int]) -> dict[str, Any]:
        rows = {
            "groups": [self._index.run.groups[number] for number in numbers],
            "rollouts": [row for number in numbers for row in self._index.attempts(number)],
        }
        self._index.tables.forget()
        return rows

    def _counts(self, began: float) -> dict[str, Any]:
        """What the page counts itself where it has all rows."""
        names = ("all_groups", "done", "under_way", "finished", "level", "source", "drawn again", "cost")
        select = """SELECT count(*), ifnull(sum(written OR dropped), 0),
            ifnull(sum(NOT written AND NOT dropped), 0),
            ifnull(sum((written OR dropped) AND began > ?), 0),
            max(level != ''), max(source != ''), max(draws > 0), max(cost IS NOT NULL) FROM found"""
        row = dict(zip(names, self._index.tables.database.execute(select, (began,)).fetchone(), strict=True))
        columns = [name for name in names[4:] if row.pop(name)]
        return {**row, "columns": columns}


def _last_turns(line: dict[str, Any]) -> dict[str, Any]:
    names = ("completions", "steps", "tool_calls")
    if all(len(line[name]) <= _MOST_TURNS for name in names):
        return line
    note = f"until it has ended, the last {_MOST_TURNS} completions, steps and tool calls are shown"
    return {**line, "notes": [*line["notes"], note], **{name: line[name][-_MOST_TURNS:] for name in names}}
