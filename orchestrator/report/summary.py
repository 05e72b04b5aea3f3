"""The light part of the report: a row per attempt and per group, figures of the whole run, and facts of it."""

from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from orchestrator.report.curriculum import Curriculum
from orchestrator.report.facts import facts_of, outcome_kinds
from orchestrator.report.measured import TaskCounts
from orchestrator.report.totals import Row, Totals
from orchestrator.run.files import read_description
from orchestrator.run.lenient import Skipped, mapping, text, texts
from orchestrator.types import TokenSource

_KINDS = [{True, False}, {False}, {True}, set[bool]()]  # of groups, by what its members solved
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
    directory: str = ""  # as the user wrote it; empty: a groups file alone is shown
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what makes the data less than they could be
    totals: Totals = field(default_factory=Totals)
    curriculum: Curriculum = field(default_factory=Curriculum)
    # The last ones; `forgotten` attempts were before them.
    rollouts: MutableMapping[str, Row] = field(default_factory=dict)
    groups: MutableMapping[int, Row] = field(default_factory=dict)
    forgotten: int = 0
    forgotten_groups: int = 0
    bad_tasks: list[Row] = field(default_factory=list)  # the first ones
    skipped: Skipped = field(default_factory=Skipped)
    places: MutableMapping[str, int] = field(default_factory=dict)
    written: MutableMapping[str, tuple[int, int]] = field(default_factory=dict)
    measured: TaskCounts | None = None  # of an evaluation
    samples_per_task: int = 1
    shared: bool = False  # without answers
    mcp_tools: dict[str, str] = field(default_factory=dict)  # by name: the server that has it

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
            "evaluation": None if self.measured is None else self.measured.shown(self.samples_per_task),
            "shared": self.shared,
            "mcp_tools": self.mcp_tools,
        }

    def leave_out_answers(self) -> None:
        """Takes out reference answers and all that may tell them: a right answer is one, so answers go too, and
        texts of errors and reasons. Details must not be written then."""
        self.shared = True
        for group in self.groups.values():
            group["reference"], group["dropped"] = None, ""
        for row in self.rollouts.values():
            row["answer"], row["reason"], row["continued"] = None, "", []
            row["errors"] = {kind: (steps, "") for kind, (steps, _) in row["errors"].items()}
        for task in self.bad_tasks:
            task["reason"] = ""
        self.totals.leave_out_texts()

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


def describe(run: Run, run_directory: Path) -> None:
    """Says of the run what its run.json and its figures tell now."""
    description = read_description(run_directory)
    run.notes = [] if description else ["run.json is missing or cannot be read: what ran is not known"]
    run.facts = facts_of(description)
    if run.totals.tokens:
        rate = 1000 * run.totals.mixed / run.totals.tokens
        run.facts.append(("informative groups", f"{run.totals.mixed}, {rate:.3g} per 1,000 sampled tokens"))
    run.facts += run.curriculum.facts()
    run.notes += texts(description.get("notes"))
    of_servers = mapping(mapping(description.get("agent")).get("mcp_tools"))
    run.mcp_tools = {text(name, 80): text(mapping(one).get("server"), 40) for name, one in of_servers.items()}
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
