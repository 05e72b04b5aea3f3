"""Settings of what a run leaves on disk, and where it can be watched."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.settings.kinds import Choice, File, Flag, Integer, Text
from orchestrator.settings.row import PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import AgentSpec

_PORT = re.compile(r"(?:(?:[A-Za-z0-9][\w.-]*|\[[0-9a-fA-F:]+\]):)?[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True, repr=False)
class OutputSettings(Settings, group="Output", resume=Resume.FREE, commands=RUNS):
    """What a run writes and shows."""

    data_path_to_save_groups: Path | None = row(
        None,
        File(),
        "the groups file, with an HTML report beside it; an existing file gets a fresh name",
        resume=Resume.CONFIRM,
        unset="RUN_DIR/groups.jsonl",
        commands=("demo", "process", "serve"),
    )
    run_dir: Path | None = row(
        None,
        File(),
        "the run directory: settings, and a record of all that happened",
        unset="runs/TIME",
        commands=(*RUNS, "demo", "doctor", *PLAYS, "rescore"),
        first_run=RUNS,
    )
    resume: Path | None = row(
        None,
        File(),
        "a run directory, to continue its run with its settings",
        commands=(*RUNS, "demo"),
        first_run=("process", "evaluate"),
    )
    fsync: bool = row(
        False,
        Flag(),
        "wait until each line is safe from a power loss before it counts",
        commands=(*RUNS, *PLAYS),
    )
    include_messages: bool = row(
        True,
        Flag(),
        "messages in the groups file",
        resume=Resume.DATA,
        commands=(*RUNS, "rescore"),
        from_run=("branch", "export", "rescore"),
    )
    save_full_traces: bool = row(True, Flag(), "the agent's steps in rollouts.jsonl")
    agent_verbosity: int = row(
        0, Integer(0, 3), "how much the agent logs in its sandbox", to=(AgentSpec, "verbosity")
    )
    metrics_port: str | None = row(
        None,
        Text("a port, or HOST:PORT for others than this machine", "[HOST:]PORT", _PORT.fullmatch),
        "Prometheus metrics at http://127.0.0.1:PORT/metrics; 0: a free port; docs/metrics.md",
    )
    view_port: str | None = row(
        None,
        Text("a port, or HOST:PORT for others than this machine", "[HOST:]PORT", _PORT.fullmatch),
        "the report of the run under way, in a browser; 0: a free port",
    )
    compress: Literal["none", "zstd"] = row(
        "none",
        Choice(("none", "zstd")),
        "zstd: rollouts.jsonl.zst and groups.jsonl.zst, a tenth of the size; all commands read both",
        resume=Resume.CONFIRM,
    )
