"""The light part of the report: one row per attempt and per group, and facts of the run.

Reads each file once and keeps rows and the offsets of lines, which `details` reads again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.run.files import read_description
from orchestrator.run.lenient import Skipped, count, json_lines, mapping, number, numbers, objects, text, texts
from orchestrator.types import EndedName, FailedName, TokenSource, is_solved

Row = dict[str, Any]
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


def read_run(run_directory: Path, groups_file: Path) -> Run:
    """Reads everything but the details."""
    run, staleness = Run(), dict[str, int | float | None]()
    for offset, line in json_lines(groups_file):
        overrides = objects(line.get("overrides")) if line else []
        run.skipped.group_lines += not overrides
        for place, override in enumerate(overrides):
            rollout_id = text(override.get("rollout_id"), 200)
            run.written[rollout_id] = offset, place
            staleness[rollout_id] = number(override.get("staleness"))
    for offset, line in json_lines(run_directory / "rollouts.jsonl"):
        if line is None or not _take(run, line, offset):
            run.skipped.rollout_lines += 1
    for rollout_id, row in run.rollouts.items():
        row["staleness"] = staleness.get(rollout_id)
    _compare(run)
    _describe(run, run_directory)
    return run


def outcome_kinds() -> dict[str, str]:
    """Outcome → `ended` (the policy's doing, scored) or `failed` (not the policy's doing)."""
    return dict.fromkeys(map(str, EndedName), "ended") | dict.fromkeys(map(str, FailedName), "failed")


def _compare(run: Run) -> None:
    """Marks groups that were written, and those whose members differ in score or in being solved."""
    members: dict[int, list[Row]] = {key: [] for key in run.groups}
    for row in run.rollouts.values():
        if row["score"] is not None:
            members[row["group"]].append(row)
    for key, group in run.groups.items():
        group["written"] = any(row["id"] in run.written for row in members[key])
        group["mixed"] = len({row["score"] for row in members[key]}) > 1
        group["divided"] = len({row["solved"] for row in members[key]}) > 1


def _take(run: Run, line: dict[str, Any], offset: int) -> bool:
    """Adds one line of rollouts.jsonl to the rows. False: the line is unusable."""
    rollout_id, outcome, place = line.get("rollout_id"), line.get("outcome"), count(line.get("group"))
    if not isinstance(rollout_id, str) or not isinstance(outcome, str) or place != line.get("group"):
        return False
    if "plan" not in line:
        run.bad_tasks.append({"task": text(line.get("task_id"), 300), "reason": text(line.get("reason"), 1000)})
        return True
    row = _rollout(line, text(rollout_id, 200), place)
    run.rollouts[row["id"]] = row  # should an id come twice, the last line counts
    run.places[row["id"]] = offset
    group = run.groups.setdefault(place, _group(line, place))
    group["question"] = group["question"] or _question(line)
    return True


def _group(line: dict[str, Any], place: int) -> Row:
    return {
        "number": place,
        "task": text(line.get("task_id"), 300),
        "level": text(line.get("level"), 40),
        "source": text(line.get("source"), 80),
        "question": "",
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
        "calls": len(objects(line.get("tool_calls"))),
    }


def _question(line: dict[str, Any]) -> str:
    """The task as the agent got it: the first user message, without smolagents' first line."""
    for completion in objects(line.get("completions")):
        for message in objects(completion.get("messages")):
            if message.get("role") == "user":
                return text(message.get("content"), 2000).removeprefix("New task:\n")
    return ""


def _describe(run: Run, run_directory: Path) -> None:
    told = read_description(run_directory)
    if not told:
        run.notes.append("run.json is missing or cannot be read: what ran is not known")
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
    run.warnings += [f"{sources[s]} rollouts are {note}{why}" for s, note in _TOKEN_SOURCES.items() if sources[s]]


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
