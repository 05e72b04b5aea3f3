"""The light part of the report: a row per attempt and per group, figures of the whole run, and facts of it.

Reads each file once, and keeps the rows of the last attempts with the offsets of their lines, which `details`
reads again. Memory does not grow with the run: of each group that was forgotten a bit is kept. Figures are exact
but for an id that comes again after it was forgotten.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from orchestrator.report.curriculum import Curriculum
from orchestrator.report.rows import group_row, question_of, rollout_row
from orchestrator.report.totals import Row, Totals, is_aside
from orchestrator.run.files import CURRICULUM_FILE, DROPPED_FILE, is_going_on, read_description, record_of
from orchestrator.run.lenient import (
    Skipped,
    count,
    line_near_end,
    lines_from,
    mapping,
    number,
    objects,
    parse,
    text,
    texts,
)
from orchestrator.run.prices import PriceList, Prices
from orchestrator.types import EndedName, FailedName, TokenSource

MOST_ATTEMPTS = 20_000  # that have a row; of those before, the figures are kept
MOST_HELD = 1000  # groups that are not forgotten, as something in them is wanted
MOST_BAD_TASKS = 500  # that are told one by one
_MOST_NUMBER_BYTES = 4 << 20
_KINDS = [{True, False}, {False}, {True}, set[bool]()]  # of groups, by what its members solved
NO_PRICES = PriceList()
_TOKEN_SOURCES: dict[TokenSource, str] = {
    "retokenized": "retokenized, that is their ids were made from text again and may differ from those sampled",
    "none": "without token ids: the endpoint gave none and no tokenizer was set",
}


@dataclass(slots=True)
class Run:
    """What the page's overview shows, and where the details are.

    `places[rollout_id]` is the offset of its line in rollouts.jsonl; `written[rollout_id]` the offset
    of its group's line in the groups file and its place in that group.
    """

    name: str = ""
    directory: str = ""  # as the user wrote it
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what makes the data less than they could be
    totals: Totals = field(default_factory=Totals)
    curriculum: Curriculum = field(default_factory=Curriculum)
    rollouts: dict[str, Row] = field(default_factory=dict)  # the last ones; `forgotten` attempts were before them
    groups: dict[int, Row] = field(default_factory=dict)
    forgotten: int = 0
    forgotten_groups: int = 0
    bad_tasks: list[Row] = field(default_factory=list)  # the first ones
    skipped: Skipped = field(default_factory=Skipped)
    places: dict[str, int] = field(default_factory=dict)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)

    def overview(self) -> dict[str, Any]:
        """What a finished and a live report show of the whole run."""
        return {
            "name": self.name,
            "directory": self.directory,
            "facts": self.facts,
            "notes": self.notes,
            "warnings": self.warnings,
            "kinds": outcome_kinds(),
            "totals": self.totals.shown(),
            "skipped": asdict(self.skipped),
            "forgotten": self.forgotten,
            "forgotten_groups": self.forgotten_groups,
        }

    def most_telling(self) -> list[Row]:
        """Attempts: the first of each outcome, then whole groups, in turns one of each level and kind: with right
        and wrong answers, all wrong, all right, and those without a score."""
        members: dict[int, list[Row]] = {}
        for row in sorted(self.rollouts.values(), key=lambda row: (row["group"], row["index"], row["attempt"])):
            members.setdefault(row["group"], []).append(row)
        queues: dict[tuple[int, str], list[list[Row]]] = {}
        for group, attempts in members.items():
            kind = _KINDS.index({row["solved"] for row in attempts if row["score"] is not None})
            queues.setdefault((kind, self.groups[group]["level"]), []).append(attempts)
        turns = zip_longest(*(queue for _, queue in sorted(queues.items())), fillvalue=[])
        rows = [row for turn in turns for attempts in turn for row in attempts]
        firsts = {row["outcome"]: row["id"] for row in reversed(rows)}
        return sorted(rows, key=lambda row: firsts[row["outcome"]] != row["id"])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a page is to have: the rollout of that id, the group of that number, or all with that outcome."""

    rollout: str | None = None
    group: int | None = None
    outcome: str | None = None

    def __str__(self) -> str:
        names = {"rollout": self.rollout, "group": self.group, "outcome": self.outcome}
        return " and ".join(f"the {name} {value}" for name, value in names.items() if value is not None)

    def fits(self, row: Row) -> bool:
        given = {"id": self.rollout, "group": self.group, "outcome": self.outcome}
        return all(row[name] == value for name, value in given.items() if value is not None)


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
    if wanted is not None:
        run.rollouts = {name: row for name, row in run.rollouts.items() if wanted.fits(row)}
        numbers = {row["group"] for row in run.rollouts.values()}
        run.groups = {number: row for number, row in run.groups.items() if number in numbers}
    return run


class RunReader:
    """Reads a run that is over, or one that goes on, again and again: each time only what is new.

    `growing`: lines that are not whole yet are left for the next time. `behind_bytes`: of each file, at the first
    time, only that much of its end is read. Groups that were begun first are forgotten first, and last those with
    something `wanted`.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        growing: bool = False,
        behind_bytes: int | None = None,
        also: Counting | None = None,
        wanted: Wanted | None = None,
        price_list: PriceList = NO_PRICES,
    ) -> None:
        self._wanted = wanted
        self._held: set[int] = set()  # groups with something wanted
        self.run = Run(name=run_directory.absolute().name, directory=str(run_directory))
        self._price_list = price_list
        self._prices: Prices | None = None
        self._counting: tuple[Counting, ...] = (self.run.totals,) if also is None else (self.run.totals, also)
        self._behind_bytes = behind_bytes
        self._directory = run_directory
        self._growing = growing
        self._next: dict[Path, int] = {}  # where to go on in a file
        self._left_out = False  # the beginning of a file was not read
        self._members: dict[int, dict[int, dict[str, None]]] = {}  # ids by group and index, in the order they came
        self._staleness: dict[str, float | None] = {}
        self._dropped: dict[int, str] = {}  # why groups were not written, also of groups that are not known yet
        self._ungraded: dict[tuple[int, int], None] = {}  # places whose last attempt lacks its score
        self._seen = _Numbers()  # groups
        self._changed: set[int] = set()  # groups that nobody was told of

    def read(self, groups_file: Path | None) -> set[int]:
        """Takes what is new; gives the numbers of the groups of which something is."""
        run, changed = self.run, self._changed
        self._prices = self._prices or self._price_list.of(read_description(self._directory))
        for offset, line in self._new(record_of(self._directory)):
            if line is None or not self._take(line, offset):
                run.skipped.rollout_lines += 1
        for offset, line in self._new(groups_file):
            overrides = objects(line.get("overrides")) if line else []
            run.skipped.group_lines += not overrides
            if line and overrides:
                run.totals.count_written(line)
            for place, override in enumerate(overrides):
                self._take_written(override, offset, place)
        for _, line in self._new(self._directory / DROPPED_FILE):
            if line is not None and type(line.get("group")) is int:
                self._take_drop(line["group"], text(line.get("reason"), 500))
                changed.add(line["group"])
        for _, line in self._new(self._directory / CURRICULUM_FILE):
            run.curriculum.take(line or {})
        changed &= run.groups.keys()
        for each in changed:
            self._compare(each)
        _describe(run, self._directory)
        if self._left_out:
            run.notes.append("the run is older than this page: figures begin in the middle of its files")
        self._changed = set()
        return changed

    def attempts(self, group: int) -> list[Row]:
        """The rows of a group. An id that came twice belongs to the group that it came with last."""
        return [self.run.rollouts[name] for names in self._members.get(group, {}).values() for name in names]

    def _new(self, path: Path | None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        if path is None:
            return
        if path not in self._next and self._behind_bytes is not None:
            self._next[path] = line_near_end(path, self._behind_bytes)
            self._left_out |= self._next[path] > 0
        for line in lines_from(path, self._next.get(path, 0)):
            if self._growing and not line.is_whole:
                return
            self._next[path] = line.end
            if line.text.strip():
                yield line.offset, parse(line.text)

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
        took = row["id"], row["prompt_tokens"], row["tokens"]
        row["cost"] = None if self._prices is None else self._prices.cost(*took)
        if number not in run.groups:
            run.groups[number] = group_row(line, number)
            run.totals.groups += self._seen.add(number)
        group = run.groups[number]
        group["question"] = group["question"] or question_of(line)
        if line.get("reference") is not None:
            group["reference"] = text(line.get("reference"), 2000)
        self._add(row, group, offset)
        while max(len(run.rollouts), len(run.groups)) > MOST_ATTEMPTS:
            rest = (number for number in islice(run.groups, MOST_HELD + 1) if number not in self._held)
            self._forget(next(rest, next(iter(run.groups))))
        return True

    def _add(self, row: Row, group: Row, offset: int) -> None:
        """Should an id come twice, the last line counts."""
        run, name, place = self.run, row["id"], (row["group"], row["index"])
        if (before := run.rollouts.get(name)) is not None:
            self._take_back(before)
            row["counts"] = before["counts"]
        names = self._members.setdefault(row["group"], {}).setdefault(row["index"], {})
        if before is None and place in self._ungraded:
            del self._ungraded[place]
            row["counts"] = False
        elif before is None and names:
            run.totals.count_draw(run.rollouts[next(reversed(names))])
        if row["ungraded"]:
            _keep_last(self._ungraded, place, None, keep=())
        for counting in self._counting:
            counting.count(row, group)
        if self._wanted is not None and len(self._held) < MOST_HELD and self._wanted.fits(row):
            self._held.add(row["group"])
        names[name] = None
        run.rollouts[name] = row
        run.places[name] = offset
        self._changed.add(row["group"])

    def _take_back(self, row: Row) -> None:
        """A later line takes the place of this one."""
        for counting in self._counting:
            counting.count(row, self.run.groups[row["group"]], -1)
        if row["ungraded"]:
            self._ungraded.pop((row["group"], row["index"]), None)
        places = self._members[row["group"]]
        del places[row["index"]][row["id"]]
        if not places[row["index"]]:
            del places[row["index"]]

    def _take_written(self, override: dict[str, Any], offset: int, place: int) -> None:
        rollout_id = text(override.get("rollout_id"), 200)
        if is_aside(override) and rollout_id in self.run.written:
            return  # a side line of a rollout whose main line was there
        _keep_last(self.run.written, rollout_id, (offset, place), keep=self.run.rollouts)
        _keep_last(self._staleness, rollout_id, number(override.get("staleness")), keep=self.run.rollouts)
        if (row := self.run.rollouts.get(rollout_id)) is not None:
            self._changed.add(row["group"])

    def _take_drop(self, group: int, reason: str) -> None:
        self._undrop(group)  # a resume tried it again
        self.run.totals.count_drop(reason)
        _keep_last(self._dropped, group, reason, keep=self.run.groups)

    def _undrop(self, group: int) -> None:
        if (reason := self._dropped.pop(group, None)) is not None:
            self.run.totals.count_drop(reason, -1)

    def _compare(self, group: int) -> None:
        """Marks a group that was written, and one whose members differ in score or in being solved."""
        rows, row = self.attempts(group), self.run.groups[group]
        for one in rows:
            one["staleness"] = self._staleness.get(one["id"])
        members = [one for one in rows if one["score"] is not None]
        row["written"] = any(one["id"] in self.run.written for one in members)
        if row["written"]:
            self._undrop(group)
        row["dropped"] = self._dropped.get(group, "")
        row["mixed"] = len({one["score"] for one in members}) > 1
        row["divided"] = len({one["solved"] for one in members}) > 1

    def _forget(self, group: int) -> None:
        run = self.run
        for row in self.attempts(group):
            name = row["id"]
            run.written.pop(name, None)
            self._staleness.pop(name, None)
            del run.rollouts[name], run.places[name]
            run.forgotten += 1
        del run.groups[group]
        self._members.pop(group, None)
        self._dropped.pop(group, None)
        self._changed.discard(group)
        run.forgotten_groups += 1


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


def _keep_last(entries: dict[Any, Any], key: object, value: object, *, keep: Container[Any]) -> None:
    """Adds an entry. Of those whose key is not known, as it was forgotten or is yet to come, the last are kept."""
    entries[key] = value
    if len(entries) >= 3 * MOST_ATTEMPTS:
        for old in list(entries)[:-MOST_ATTEMPTS]:
            if old not in keep:
                del entries[old]


def outcome_kinds() -> dict[str, str]:
    """Outcome → `ended` (the policy's doing, scored) or `failed` (not the policy's doing)."""
    return dict.fromkeys(map(str, EndedName), "ended") | dict.fromkeys(map(str, FailedName), "failed")


def _describe(run: Run, run_directory: Path) -> None:
    description = read_description(run_directory)
    run.notes = [] if description else ["run.json is missing or cannot be read: what ran is not known"]
    config = mapping(description.get("config"))
    env, openai = mapping(config.get("env")), config.get("openai")
    server = (objects(openai) or [mapping(openai)])[0]
    sandbox = mapping(description.get("sandbox"))
    facts: list[tuple[str, object]] = [
        ("model", server.get("model_name")),
        ("endpoint", _host(text(server.get("base_url")))),
        ("tasks", description.get("tasks") or env.get("dataset")),
        ("group size", env.get("group_size")),
        ("seed", description.get("seed")),
        ("temperature", env.get("temperature")),
        ("max steps", env.get("max_steps")),
        ("scoring", env.get("scoring_strategy")),
        ("token ids", _token_ids(description)),
        ("docker", sandbox.get("docker")),
        ("isolation", sandbox.get("isolation") or sandbox.get("runtime")),
        ("image", sandbox.get("image")),
        ("image id", text(sandbox.get("image_id"), 200).removeprefix("sha256:")[:12]),
        ("version", description.get("version")),
    ]
    run.facts = [(text(name, 40), text(value, 200)) for name, value in facts if value not in (None, "")]
    if run.totals.tokens:
        rate = 1000 * run.totals.mixed / run.totals.tokens
        run.facts.append(("informative groups", f"{run.totals.mixed}, {rate:.3g} per 1,000 sampled tokens"))
    run.facts += run.curriculum.facts()
    run.notes += texts(description.get("notes"))
    sources = run.totals.token_sources
    why = f" ({text(description.get('why_text'), 200)})" if description.get("why_text") else ""
    run.warnings = [f"{sources[s]} rollouts are {note}{why}" for s, note in _TOKEN_SOURCES.items() if sources[s]]
    run.warnings += run.curriculum.warnings()
    if untrained := run.totals.untrained_tokens:
        part = 100 * untrained / (untrained + run.totals.trained_tokens)
        run.warnings.append(
            f"{part:.1f} % of the tokens sampled in written groups are untrained here: they are in lines that the "
            "groups file leaves out (env.trained_segments, env.main_line)"
        )


def _token_ids(description: Mapping[str, Any]) -> object:
    """Whether they are the sampled ones, and if not, why not."""
    why = text(description.get("why_text"), 150)
    return f"{text(description.get('token_ids'), 40)}: {why}" if why else description.get("token_ids")


def _host(base_url: str) -> str:
    """Host and port of the endpoint, without credentials and query; for a replay the name of the recording."""
    if base_url.startswith("replay:"):
        return f"replay of {Path(base_url).name}"
    try:
        parts = urlsplit(base_url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    return f"{parts.hostname}{port}" if parts.hostname else ""
