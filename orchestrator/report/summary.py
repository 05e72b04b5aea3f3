"""The light part of the report: one row per attempt and per group, and facts of the run.

Reads each file once and keeps rows and the offsets of lines, which `details` reads again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.run.files import DROPPED_FILE, is_going_on, read_description, record_of
from orchestrator.run.lenient import (
    Skipped,
    count,
    line_near_end,
    lines_from,
    mapping,
    number,
    numbers,
    objects,
    parse,
    text,
    texts,
)
from orchestrator.types import EndedName, FailedName, TokenSource, is_solved

Row = dict[str, Any]
MAX_WAITS = 100  # of one kind and rollout, shown in the time line
_TIMES = ("started_at", "launch_s", "duration_s", "waiting_s", "cpu_s")
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

    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what makes the data less than they could be
    rollouts: dict[str, Row] = field(default_factory=dict)
    groups: dict[int, Row] = field(default_factory=dict)
    bad_tasks: list[Row] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    places: dict[str, int] = field(default_factory=dict)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)

    def best_first(self) -> list[Row]:
        """Attempts, the most telling first: those of groups whose members differ before others."""

        def rank(row: Row) -> tuple[bool, bool, bool, int, int, int]:
            group = self.groups[row["group"]]
            disagrees = not group["divided"], not group["mixed"], not group["written"]
            return *disagrees, row["group"], row["index"], row["attempt"]

        return sorted(self.rollouts.values(), key=rank)


def read_run(run_directory: Path, groups_file: Path | None) -> Run:
    """Reads everything but the details."""
    # The last frame of a compressed file is closed at the end of its run; until then nothing is missing there.
    reader = RunReader(run_directory, growing=is_going_on(run_directory))
    reader.read(groups_file)
    return reader.run


class RunReader:
    """Reads a run that is over, or one that goes on, again and again: each time only what is new.

    `growing`: lines that are not whole yet are left for the next time. `most`: how many attempts are kept; groups
    that were begun first are forgotten first. `behind_bytes`: of each file, at the first time, only that much of
    its end is read.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        growing: bool = False,
        most: int | None = None,
        behind_bytes: int | None = None,
    ) -> None:
        self.run = Run()
        self.forgotten = self.forgotten_groups = 0  # how many attempts and groups
        self._behind_bytes = behind_bytes
        self._directory = run_directory
        self._growing = growing
        self._most = most
        self._next: dict[Path, int] = {}  # where to go on in a file
        self._members: dict[int, list[str]] = {}  # ids of a group's attempts
        self._staleness: dict[str, float | None] = {}
        self._dropped: dict[int, str] = {}  # why groups were not written, also of groups that are not known yet
        self._changed: set[int] = set()  # groups that nobody was told of

    def read(self, groups_file: Path | None) -> set[int]:
        """Takes what is new; gives the numbers of the groups of which something is."""
        run, changed = self.run, self._changed
        for offset, line in self._new(groups_file):
            overrides = objects(line.get("overrides")) if line else []
            run.skipped.group_lines += not overrides
            for place, override in enumerate(overrides):
                rollout_id = text(override.get("rollout_id"), 200)
                run.written[rollout_id] = offset, place
                self._staleness[rollout_id] = number(override.get("staleness"))
                if (row := run.rollouts.get(rollout_id)) is not None:
                    changed.add(row["group"])
        for offset, line in self._new(record_of(self._directory)):
            if line is None or (group := _take(run, line, offset)) is None:
                run.skipped.rollout_lines += 1
            elif group >= 0:
                changed.add(group)
                self._members.setdefault(group, []).append(text(line["rollout_id"], 200))
        for _, line in self._new(self._directory / DROPPED_FILE):
            if line is not None and type(line.get("group")) is int:
                self._dropped[line["group"]] = text(line.get("reason"), 500)
                changed.add(line["group"])
        self._forget()
        changed &= run.groups.keys()
        for each in changed:
            self._compare(each)
        _describe(run, self._directory)
        self._changed = set()
        return changed

    def attempts(self, group: int) -> list[Row]:
        """The rows of a group. An id that came twice belongs to the group that it came with last."""
        rows = (self.run.rollouts.get(name) for name in dict.fromkeys(self._members.get(group, ())))
        return [row for row in rows if row is not None and row["group"] == group]

    def _new(self, path: Path | None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        if path is None:
            return
        if path not in self._next and self._behind_bytes is not None:
            self._next[path] = line_near_end(path, self._behind_bytes)
        for line in lines_from(path, self._next.get(path, 0)):
            if self._growing and not line.is_whole:
                return
            self._next[path] = line.end
            if line.text.strip():
                yield line.offset, parse(line.text)

    def _compare(self, group: int) -> None:
        """Marks a group that was written, and one whose members differ in score or in being solved."""
        rows, row = self.attempts(group), self.run.groups[group]
        for one in rows:
            one["staleness"] = self._staleness.get(one["id"])
        members = [one for one in rows if one["score"] is not None]
        row["dropped"] = self._dropped.get(group, "")
        row["written"] = any(one["id"] in self.run.written for one in members)
        row["mixed"] = len({one["score"] for one in members}) > 1
        row["divided"] = len({one["solved"] for one in members}) > 1

    def _forget(self) -> None:
        run = self.run
        while self._most is not None and len(run.rollouts) > self._most and len(run.groups) > 1:
            group = next(iter(run.groups))
            for row in self.attempts(group):
                name = row["id"]
                run.written.pop(name, None)
                self._staleness.pop(name, None)
                del run.rollouts[name], run.places[name]
                self.forgotten += 1
            del run.groups[group]
            self._members.pop(group, None)
            self._dropped.pop(group, None)
            self.forgotten_groups += 1


def outcome_kinds() -> dict[str, str]:
    """Outcome → `ended` (the policy's doing, scored) or `failed` (not the policy's doing)."""
    return dict.fromkeys(map(str, EndedName), "ended") | dict.fromkeys(map(str, FailedName), "failed")


def _take(run: Run, line: dict[str, Any], offset: int) -> int | None:
    """Adds one line of rollouts.jsonl to the rows, and gives its group; -1: it is a bad task. None: the line is
    unusable."""
    rollout_id, outcome, place = line.get("rollout_id"), line.get("outcome"), count(line.get("group"))
    if not isinstance(rollout_id, str) or not isinstance(outcome, str) or place != line.get("group"):
        return None
    if "plan" not in line:
        run.bad_tasks.append({"task": text(line.get("task_id"), 300), "reason": text(line.get("reason"), 1000)})
        return -1
    row = _rollout(line, text(rollout_id, 200), place)
    run.rollouts[row["id"]] = row  # should an id come twice, the last line counts
    run.places[row["id"]] = offset
    group = run.groups.setdefault(place, _group(line, place))
    group["question"] = group["question"] or _question(line)
    if line.get("reference") is not None:
        group["reference"] = text(line.get("reference"), 2000)
    return place


def _group(line: dict[str, Any], place: int) -> Row:
    return {
        "number": place,
        "task": text(line.get("task_id"), 300),
        "level": text(line.get("level"), 40),
        "source": text(line.get("source"), 80),
        "question": "",
        "reference": None,
        "dropped": "",
        "written": False,
        "mixed": False,
        "divided": False,
    }


def _rollout(line: dict[str, Any], rollout_id: str, group: int) -> Row:
    completions = objects(line.get("completions"))
    score, parts = number(line.get("score")), numbers(line.get("score_parts"))
    failure = mapping(line.get("score_evidence")).get("failure")
    return {
        "id": rollout_id,
        "group": group,
        "index": count(line.get("index")),
        "attempt": count(line.get("attempt")),
        "outcome": text(line.get("outcome"), 60),
        "reason": text(line.get("reason") or failure, 500),
        "unscorable": failure is not None,
        "answer": None if line.get("answer") is None else text(line.get("answer"), 500),
        "score": score,
        "solved": score is not None and is_solved(score, parts),
        "parts": parts,
        "token_source": text(line.get("token_source"), 20),
        **{name: number(line.get(name)) for name in _TIMES},
        "steps": sum(c.get("kind") == "action" and not c.get("agent") for c in completions),
        # An attempt that only lacked its score comes again with it: its tokens count there.
        "tokens": 0 if line.get("ungraded") else sum(count(c.get("completion_tokens")) for c in completions),
        "prompt_tokens": 0 if line.get("ungraded") else sum(count(c.get("prompt_tokens")) for c in completions),
        "ungraded": bool(line.get("ungraded")),
        "retries": sum(count(c.get("retries")) for c in completions),
        "calls": len(objects(line.get("tool_calls"))),
        "node": text(line.get("node"), 80),
        "waits": _waits(completions, objects(line.get("tool_calls"))),
    }


def _waits(completions: list[Row], calls: list[Row]) -> list[tuple[int, int, int]]:
    """When the agent waited: (0 for a completion, 1 for a tool; begin, end in hundredths of a second)."""
    found = []
    for kind, asked in enumerate((completions, calls)):
        for one in asked[:MAX_WAITS]:
            begin, end = number(one.get("started_s")), number(one.get("ended_s"))
            if begin is not None and end is not None and 0 <= begin <= end:
                found.append((kind, round(begin * 100), round(end * 100)))
    return sorted(found, key=lambda wait: wait[1])


def _question(line: dict[str, Any]) -> str:
    """The task as the agent got it: the first user message, without smolagents' first line."""
    for completion in objects(line.get("completions")):
        for message in objects(completion.get("messages")):
            if message.get("role") == "user":
                return text(message.get("content"), 2000).removeprefix("New task:\n")
    return ""


def _describe(run: Run, run_directory: Path) -> None:
    told = read_description(run_directory)
    run.notes = [] if told else ["run.json is missing or cannot be read: what ran is not known"]
    config = mapping(told.get("config"))
    env, openai = mapping(config.get("env")), config.get("openai")
    server = (objects(openai) or [mapping(openai)])[0]
    sandbox = mapping(told.get("sandbox"))
    facts: list[tuple[str, object]] = [
        ("model", server.get("model_name")),
        ("endpoint", _host(text(server.get("base_url")))),
        ("tasks", told.get("tasks") or env.get("dataset")),
        ("group size", env.get("group_size")),
        ("seed", told.get("seed")),
        ("temperature", env.get("temperature")),
        ("most steps", env.get("max_steps")),
        ("scoring", env.get("scoring_strategy")),
        ("token ids", _token_ids(told)),
        ("docker", sandbox.get("docker")),
        ("isolation", sandbox.get("isolation") or sandbox.get("runtime")),
        ("image", sandbox.get("image")),
        ("image id", text(sandbox.get("image_id"), 200).removeprefix("sha256:")[:12]),
        ("version", told.get("version")),
    ]
    run.facts = [(text(name, 40), text(value, 200)) for name, value in facts if value not in (None, "")]
    run.notes += texts(told.get("notes"))
    sources = Counter(row["token_source"] for row in run.rollouts.values())
    why = f" ({text(told.get('why_text'), 200)})" if told.get("why_text") else ""
    run.warnings = [f"{sources[s]} rollouts are {note}{why}" for s, note in _TOKEN_SOURCES.items() if sources[s]]


def _token_ids(told: Mapping[str, Any]) -> object:
    """Whether they are the sampled ones, and if not, why not."""
    why = text(told.get("why_text"), 150)
    return f"{text(told.get('token_ids'), 40)}: {why}" if why else told.get("token_ids")


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
