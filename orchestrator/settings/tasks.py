"""Settings of where tasks come from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.errors import ConfigError
from orchestrator.settings.json_kinds import Table, Texts
from orchestrator.settings.kinds import NAME, OBJECT, Choice, File, Flag, Integer, Text, forms
from orchestrator.settings.row import PLAYS, RUNS, TASKS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.tasks.base import COLUMNS

DEMO_TASKS = {  # by `demo --tasks`; they come with this package, so any run may name them
    "questions": "python:orchestrator.demo.recording:tasks",
    "code": "python:orchestrator.demo.recording:code_tasks",
}
_DATASET = re.compile(rf"gaia|(?:harbor|jsonl|csv|hf|reasoning_gym):\S.*|python:{OBJECT}")
_EVAL_SPLIT = re.compile(r"hash:0?\.(?!0+$)[0-9]{1,9}|[A-Za-z0-9][\w.-]*")
_START = re.compile(r"(.+?)(?: back:([1-9]\d{0,3}))?")


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskSettings(Settings, group=TASKS, resume=Resume.DATA, commands=RUNS):
    """Which tasks there are, and which of them are taken."""

    dataset: str = row(
        "gaia",
        forms(
            *("SOURCE", _DATASET.fullmatch, "gaia", "harbor:PATH", "jsonl:PATH", "csv:PATH"),
            *("hf:NAME", "python:MODULE:FACTORY", "reasoning_gym:NAME"),
        ),
        "where tasks come from",
        resume=Resume.CODE,
        commands=(*RUNS, *PLAYS, "rescore"),
        from_run=(*PLAYS, "rescore"),
        first_run=RUNS,
    )
    dataset_path: Path = row(
        Path("data/gaia"),
        File(),
        "the GAIA folder, metadata.jsonl or parquet layout",
        commands=(*RUNS, *PLAYS, "rescore"),
        from_run=(*PLAYS, "rescore"),
    )
    split: str = row(
        "validation",
        NAME,
        "which part of the dataset",
        commands=(*RUNS, "rescore", "check-tasks"),
        from_run=(*PLAYS, "rescore"),
    )
    eval_split: str | None = row(
        None,
        Text("the name of a split, or hash:SHARE like hash:0.1", "NAME", _EVAL_SPLIT.fullmatch),
        "the part that `evaluate` takes, and others leave out; hash: a share",
        unset="none: all of env.split is evaluated",
        from_run=(*PLAYS, "rescore"),
        first_run=("evaluate", "serve"),
    )
    columns: Mapping[str, str] | None = row(
        None,
        Table(COLUMNS, Text("the dataset's own name for it")),
        "what the dataset calls our columns, of jsonl:, csv: and hf:",
        commands=(*RUNS, "rescore", "check-tasks"),
        from_run=(*PLAYS, "rescore"),
    )
    only_checked_tasks: bool = row(
        False, Flag(), "only tasks that have passed `orchestrator check-tasks`; the others are counted"
    )
    levels: tuple[str, ...] = row(
        (), Texts(Text("a level", "LEVEL")), "only tasks of these levels", commands=(*RUNS, "check-tasks")
    )
    tags: tuple[str, ...] = row(
        (),
        Texts(Text("a tag", "TAG")),
        'only tasks with one of these in metadata["tags"]',
        commands=(*RUNS, "check-tasks"),
    )
    shuffle_seed: int | None = row(
        None,
        Integer(0, 2**63 - 1),
        "shuffles the tasks; the same seed gives the same order",
        unset="none: as they come",
    )
    max_tasks: int | None = row(
        None,
        Integer(1),
        "no more tasks than these",
        unset="none: all of them",
        commands=(*RUNS, "check-tasks"),
        first_run=("evaluate",),
    )
    curriculum: Literal["none", "pools"] = row(
        "none",
        Choice(("none", "pools")),
        "pools: tasks that are nearly always, or hardly ever, solved come in every eighth round only; "
        "docs/training.md",
        commands=("process", "serve"),
    )
    start_at: str | None = row(
        None,
        Text(
            "a run directory; behind it, like back:2, how many turns before the end tasks begin at first",
            "DIR",
            _START.fullmatch,
        ),
        "an earlier run: tasks that it solved begin at the last turn of a solved rollout, and at earlier ones as "
        "they are solved; docs/branching.md",
        resume=Resume.CONFIRM,
        unset="none: every rollout begins with its task",
        commands=("process", "serve"),
    )
    total_steps: int = row(
        -1,
        Integer(1, special=(-1,)),
        "groups to make (`evaluate`: tasks); -1: every task once (`serve`: without end); if there are fewer "
        "tasks, they come again with new seeds (`evaluate`: each once)",
        resume=Resume.FREE_DATA,
        commands=(*RUNS, "demo"),
        first_run=("process",),
    )

    @property
    def mcp_server_names(self) -> frozenset[str]:
        """Names of the MCP servers that tasks may ask for. This section alone knows none."""
        return frozenset()

    @property
    def start_run(self) -> tuple[Path, int]:
        """The directory that `env.start_at` names, and how many turns rollouts have of their own at first."""
        match = _START.fullmatch(self.start_at or "")
        assert match is not None
        return Path(match[1]), int(match[2] or 1)

    def demand_rounds(self) -> None:
        """Raises ConfigError for a curriculum where every task comes once."""
        if self.curriculum != "none" and self.total_steps < 0:
            raise ConfigError(
                "env.curriculum: pools chooses which tasks come again, and with env.total_steps -1 each comes "
                "once; set --env.total_steps to more than there are tasks"
            )
