"""Reads a run's files for the report: each once, and then only what is new.

Keeps the rows of the last attempts with the offsets of their lines, which `details` reads again. Memory does not
grow with the run: of each group that was forgotten a bit is kept. Figures are exact but for an id that comes again
after it was forgotten. An index (`report/index.py`) keeps all rows, in tables.
"""

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from orchestrator.report.measured import TaskCounts
from orchestrator.report.rows import group_row, question_of, rollout_row
from orchestrator.report.summary import Run, Wanted, describe
from orchestrator.report.totals import Row, Totals, is_aside
from orchestrator.run.files import (
    CURRICULUM_FILE,
    DROPPED_FILE,
    EVALUATE,
    is_going_on,
    read_description,
    record_of,
    saved_env,
)
from orchestrator.run.lenient import count, lines_from, number, objects, parse_without, text
from orchestrator.run.prices import NO_PRICES, PriceList, Prices

MOST_ATTEMPTS = 20_000  # that have a row; of those before, the figures are kept
MOST_IN_GROUP = 2000  # attempts of one group that are kept in tables
MOST_HELD = 1000  # groups that are not forgotten, as something in them is wanted
MOST_SAMPLES = 1024  # of a task: as env.eval_samples
MOST_BAD_TASKS = 500  # that are told one by one
_MOST_NUMBER_BYTES = 4 << 20
# Arrays of a line that say nothing of its row.
_OF_ROLLOUTS = (b'"prompt_ids":[', b'"token_ids":[', b'"logprobs":[')
_OF_GROUPS = (b'"tokens":[[', b'"masks":[[', b'"inference_logprobs":[[', b'"advantages":[[')
_PART_BYTES = 64 << 20  # of lines that are read at one time, where the time is limited


class Counting(Protocol):
    """Counts attempts while they are read."""

    def count(self, row: Row, group: Row, by: int = 1) -> None:
        """Counts an attempt of `group`; with -1 no longer, as a later line took its place."""


def read_run(
    run_directory: Path,
    groups_file: Path | None,
    *,
    also: Counting | None = None,
    wanted: Wanted | None = None,
    price_list: PriceList = NO_PRICES,
) -> Run:
    """Reads everything but the details. `also` counts every attempt, those too that get no row. Only rows that are
    `wanted` are kept; the figures are of all. `price_list`: for a run without prices. Raises ConfigError if it
    lacks a model of the run."""
    # The last frame of a compressed file is closed at the end of its run; until then nothing is missing there.
    reader = RunReader(
        run_directory, growing=is_going_on(run_directory), also=also, wanted=wanted, price_list=price_list
    )
    reader.read(groups_file)
    run = reader.run
    describe(run, run_directory)
    if wanted is not None:
        run.rollouts = {name: row for name, row in run.rollouts.items() if wanted.fits(row)}
        numbers = {row["group"] for row in run.rollouts.values()}
        run.groups = {number: row for number, row in run.groups.items() if number in numbers}
    return run


class RunReader:
    """Reads a run that is over, or one that goes on, again and again: each time only what is new.

    `growing`: lines that are not whole yet are left for the next time. Groups that were begun first are forgotten
    first, and last those with something `wanted`. `table`: gives the mapping of a name; with it nothing is
    forgotten but most attempts of a group that has very many. `told`: is given each row with its line.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        growing: bool = False,
        also: Counting | None = None,
        wanted: Wanted | None = None,
        price_list: PriceList = NO_PRICES,
        table: Callable[[str], MutableMapping[Any, Any]] | None = None,
        told: Callable[[Row, dict[str, Any]], None] | None = None,
    ) -> None:
        self._wanted = wanted
        self._held: set[int] = set()  # groups with something wanted
        self._keeps_all, made = table is not None, table or _in_memory
        self._told = told
        self.run = Run(
            name=run_directory.absolute().name,
            directory=str(run_directory),
            rollouts=made("rollouts"),
            groups=made("groups"),
            places=made("places"),
            written=made("written"),
        )
        self._price_list = price_list
        self._prices: Prices | None = None
        self._counting: tuple[Counting, ...] = (self.run.totals,) if also is None else (self.run.totals, also)
        self._directory = run_directory
        self._growing = growing
        self.next: dict[Path, int] = {}  # where to go on in a file
        self.torn: set[Path] = set()  # files that end in a line that is not whole yet
        self.is_behind = False  # there is more to read than was read the last time
        # Ids by group and index, which is text here, in the order they came.
        self._members: MutableMapping[int, dict[str, dict[str, None]]] = made("members")
        self._staleness: MutableMapping[str, float | None] = made("staleness")
        # Why groups were not written, also of groups that are not known yet.
        self._dropped: MutableMapping[int, str] = made("dropped")
        # Places (group, index) whose last attempt lacks its score.
        self._ungraded: MutableMapping[str, None] = made("ungraded")
        self._seen = _Numbers()  # groups
        self._changed: set[int] = set()  # groups that nobody was told of

    def read(self, groups_file: Path | None, most: int | None = None) -> set[int]:
        """Takes what is new, of each file at `most` so many lines; gives the numbers of the groups of which
        something is."""
        run, changed = self.run, self._changed
        self.is_behind = False
        description = read_description(self._directory)
        self._prices = self._prices or self._price_list.of(description)
        if run.measured is None and description.get("command") == EVALUATE:
            self._measure(TaskCounts(), description)
        for offset, line in self._new(record_of(self._directory), _OF_ROLLOUTS, most):
            if line is None or not self._take(line, offset):
                run.skipped.rollout_lines += 1
        for offset, line in self._new(groups_file, _OF_GROUPS, most):
            overrides = objects(line.get("overrides")) if line else []
            run.skipped.group_lines += not overrides
            if line and overrides:
                run.totals.count_written(line)
            for place, override in enumerate(overrides):
                self._take_written(override, offset, place)
        for _, line in self._new(self._directory / DROPPED_FILE, (), most):
            if line is not None and type(line.get("group")) is int and abs(line["group"]) < 1 << 63:
                self._take_drop(line["group"], text(line.get("reason"), 500))
                changed.add(line["group"])
        self._read_curriculum(most)
        changed = {each for each in changed if each in run.groups}
        for each in changed:
            self._compare(each)
        self._changed = set()
        return changed

    def go_on(self, totals: Totals, measured: TaskCounts | None, places: Mapping[Path, int]) -> None:
        """Goes on where an earlier reader of the same tables was: with its figures, at its places in files."""
        self.run.totals, self._counting = totals, (totals,)
        if measured is not None:
            self._measure(measured, read_description(self._directory))
        self.next.update(places)
        self._read_curriculum(None)

    def _read_curriculum(self, most: int | None) -> None:
        for _, line in self._new(self._directory / CURRICULUM_FILE, (), most):
            self.run.curriculum.take(line or {})

    def _measure(self, measured: TaskCounts, description: dict[str, Any]) -> None:
        samples = count(saved_env(description).get("group_size"))
        self.run.measured, self.run.samples_per_task = measured, max(1, min(MOST_SAMPLES, samples))
        self._counting += (measured,)

    def attempts(self, group: int) -> list[Row]:
        """The rows of a group. An id that came twice belongs to the group that it came with last."""
        return [self.run.rollouts[name] for names in self._members.get(group, {}).values() for name in names]

    def _new(
        self, path: Path | None, arrays: tuple[bytes, ...], most: int | None
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        if path is None:
            return
        self.torn.discard(path)
        size = 0
        for place, line in enumerate(lines_from(path, self.next.get(path, 0))):
            if self._growing and not line.is_whole:
                self.torn.add(path)
                return
            if most is not None and (place >= most or size > _PART_BYTES):
                self.is_behind = True
                return
            self.next[path] = line.end
            size += len(line.text)
            if line.text.strip():
                yield line.offset, parse_without(line.text, arrays)

    def _take(self, line: dict[str, Any], offset: int) -> bool:
        """Takes one line of rollouts.jsonl. False: it is unusable."""
        run = self.run
        rollout_id, outcome, number = line.get("rollout_id"), line.get("outcome"), count(line.get("group"))
        if not isinstance(rollout_id, str) or not isinstance(outcome, str) or number != line.get("group"):
            return False
        if "plan" not in line:
            run.totals.bad_tasks += 1
            if len(run.bad_tasks) < MOST_BAD_TASKS:
                reason = text(line.get("reason"), 1000)
                run.bad_tasks.append({"task": text(line.get("task_id"), 300), "reason": reason})
            return True
        row = rollout_row(line, text(rollout_id, 200), number)
        took = row["id"], row["prompt_tokens"], row["tokens"], row["outside"].get("paid", 0)
        row["cost"] = None if self._prices is None else self._prices.cost(*took)
        if number not in run.groups:
            run.groups[number] = group_row(line, number)
            run.totals.groups += self._keeps_all or self._seen.add(number)
        group = run.groups[number]
        group["question"] = group["question"] or question_of(line)
        if line.get("reference") is not None:
            group["reference"] = text(line.get("reference"), 2000)
        self._add(row, group, offset)
        if self._told is not None:
            self._told(row, line)
        while not self._keeps_all and max(len(run.rollouts), len(run.groups)) > MOST_ATTEMPTS:
            rest = (number for number in islice(run.groups, MOST_HELD + 1) if number not in self._held)
            self._forget(next(rest, next(iter(run.groups))))
        return True

    def _add(self, row: Row, group: Row, offset: int) -> None:
        """Should an id come twice, the last line counts."""
        run, name, place = self.run, row["id"], f"{row['group']}/{row['index']}"
        if (before := run.rollouts.get(name)) is not None:
            self._take_back(before)
            row["counts"] = before["counts"]
        members = self._members.setdefault(row["group"], {})
        names = members.setdefault(str(row["index"]), {})
        if before is None and place in self._ungraded:
            del self._ungraded[place]
            row["counts"] = False
        elif before is None and names:
            run.totals.count_draw(run.rollouts[next(reversed(names))])
        if row["ungraded"]:
            self._keep_last(self._ungraded, place, None, keep=())
        for counting in self._counting:
            counting.count(row, group)
        if self._wanted is not None and len(self._held) < MOST_HELD and self._wanted.fits(row):
            self._held.add(row["group"])
        names[name] = None
        run.rollouts[name] = row
        run.places[name] = offset
        self._changed.add(row["group"])
        if self._keeps_all and sum(map(len, members.values())) > MOST_IN_GROUP:
            first = self.run.rollouts[next(iter(next(iter(members.values()))))]
            self._leave(first)
            self._forget_attempt(first["id"])

    def _take_back(self, row: Row) -> None:
        """A later line takes the place of this one."""
        for counting in self._counting:
            counting.count(row, self.run.groups[row["group"]], -1)
        if row["ungraded"]:
            self._ungraded.pop(f"{row['group']}/{row['index']}", None)
        self._leave(row)

    def _leave(self, row: Row) -> None:
        """The attempt is none of its group any more."""
        members, index = self._members[row["group"]], str(row["index"])
        del members[index][row["id"]]
        if not members[index]:
            del members[index]

    def _take_written(self, override: dict[str, Any], offset: int, place: int) -> None:
        rollout_id = text(override.get("rollout_id"), 200)
        if is_aside(override) and rollout_id in self.run.written:
            return  # a side line of a rollout whose main line was there
        self._keep_last(self.run.written, rollout_id, (offset, place), keep=self.run.rollouts)
        self._keep_last(self._staleness, rollout_id, number(override.get("staleness")), keep=self.run.rollouts)
        if (row := self.run.rollouts.get(rollout_id)) is not None:
            self._changed.add(row["group"])

    def _take_drop(self, group: int, reason: str) -> None:
        self._undrop(group)  # a resume tried it again
        self.run.totals.count_drop(reason)
        self._keep_last(self._dropped, group, reason, keep=self.run.groups)

    def _undrop(self, group: int) -> None:
        if (reason := self._dropped.pop(group, None)) is not None:
            self.run.totals.count_drop(reason, -1)

    def _compare(self, group: int) -> None:
        """Marks a group that was written, and one whose members differ in score or in being solved."""
        run, rows = self.run, self.attempts(group)
        row = run.groups[group]
        for one in rows:
            one["staleness"] = self._staleness.get(one["id"])
        members = [one for one in rows if one["score"] is not None]
        row["written"] = any(one["id"] in run.written for one in members)
        if run.measured is not None:  # without a groups file: a task is done when each of its samples was made
            made = {one["index"] for one in rows if not one["ungraded"]}
            row["written"] = len(made) >= run.samples_per_task
        if row["written"]:
            self._undrop(group)
        row["dropped"] = self._dropped.get(group, "")
        row["mixed"] = len({one["score"] for one in members}) > 1
        row["divided"] = len({one["solved"] for one in members}) > 1

    def _forget(self, group: int) -> None:
        run = self.run
        for row in self.attempts(group):
            self._forget_attempt(row["id"])
        del run.groups[group]
        self._members.pop(group, None)
        self._dropped.pop(group, None)
        self._changed.discard(group)
        run.forgotten_groups += 1

    def _forget_attempt(self, name: str) -> None:
        run = self.run
        run.written.pop(name, None)
        self._staleness.pop(name, None)
        del run.rollouts[name], run.places[name]
        run.forgotten += 1

    def _keep_last(
        self, entries: MutableMapping[Any, Any], key: object, value: object, *, keep: Container[Any]
    ) -> None:
        """Adds an entry. Of those whose key is not known, as it was forgotten or is yet to come, the last are
        kept."""
        entries[key] = value
        if not self._keeps_all and len(entries) >= 3 * MOST_ATTEMPTS:
            for old in list(entries)[:-MOST_ATTEMPTS]:
                if old not in keep:
                    del entries[old]


def _in_memory(_: str) -> dict[Any, Any]:
    return {}


class _Numbers:
    """Which whole numbers came, a bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> bool:
        """Whether it is new. One that no run reaches always is."""
        place, bit = number >> 3, 1 << (number & 7)
        if place > _MOST_NUMBER_BYTES:
            return True
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        new = not self._bits[place] & bit
        self._bits[place] |= bit
        return new
