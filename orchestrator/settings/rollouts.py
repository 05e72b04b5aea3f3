"""Settings of rollouts, their groups, and what of them is trained on."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from orchestrator.errors import ConfigError
from orchestrator.rules.forks import BranchRule
from orchestrator.settings.json_kinds import Words
from orchestrator.settings.kinds import Choice, File, Flag, Integer, Number, Text, forms, seconds
from orchestrator.settings.row import AUTO, PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import AgentSpec, EndedName, MainLine

_GROUP_POLICY = re.compile(r"backfill|drop|partial:[1-9][0-9]{0,5}")


@dataclass(frozen=True, kw_only=True, repr=False)
class RolloutSettings(Settings, group="Rollouts and groups", resume=Resume.DATA, commands=("process", "serve")):
    """How many rollouts a group has, what becomes of broken ones, and what is trained on."""

    group_size: int = row(
        8,
        Integer(1, 1024),
        "rollouts per task, compared with each other",
        commands=("process", "serve", "export"),
        from_run=("demo", "export", "rescore"),
        first_run=("process", "serve"),
    )
    max_steps: int = row(
        12,
        Integer(1, 10_000),
        "agent steps",
        commands=(*RUNS, "branch"),
        to=(AgentSpec, "max_steps"),
        from_run=("demo", "branch"),
        first_run=RUNS,
    )
    max_cost: float | None = row(
        None,
        Number(above=0),
        "the run ends in order before its completions cost more; requests count when their rollout is over; needs "
        "--openai.prompt_price and --openai.completion_price, --env.price_table, or --env.request_price",
        resume=Resume.FREE,
        commands=RUNS,
    )
    price_table: Path | None = row(
        None,
        File(),
        "YAML with lines `MODEL: {prompt: 2.5, completion: 10}`, per million tokens",
        resume=Resume.FREE,
        commands=RUNS,
    )
    request_price: float | None = row(
        None,
        Number(at_least=0),
        "money per request of a sandbox that the network answered (env.egress), to tell the cost",
        resume=Resume.FREE,
        commands=RUNS,
    )
    max_retries: int = row(
        2,
        Integer(0, 100),
        "new attempts after a failure of the infrastructure",
        resume=Resume.FREE,
        commands=(*RUNS, *PLAYS),
    )
    group_policy: str = row(
        "backfill",
        forms("POLICY", _GROUP_POLICY.fullmatch, "backfill", "drop", "partial:K", rest=" (K up to group_size)"),
        "for a rollout that failed for good: draw another, drop its group, or keep a group of at least K",
        commands=("process", "serve", "rescore", "export"),
        from_run=("export", "rescore"),
    )
    zero_variance: Literal["keep", "drop", "resample"] = row(
        "keep",
        Choice(("keep", "drop", "resample")),
        "a group of equal scores is kept, dropped, or drawn once more",
        commands=("process", "serve", "rescore", "export"),
        from_run=("export", "rescore"),
    )
    max_open_groups: int | None = row(
        None,
        Integer(1, 100_000),
        "groups begun and not ended; auto: max_concurrent_sandboxes + 1; docs/performance.md",
        resume=Resume.FREE,
        unset=AUTO,
        commands=RUNS,
    )
    branch: str | None = row(
        None,
        Text(
            "turns:K,K width:W (K from 2 on), entropy:TOP width:W or python:MODULE:FUNCTION, and trunk:trained or "
            "trunk:masked",
            "RULE",
            BranchRule.parse,
        ),
        "trees as groups (docs/branching.md)",
        resume=Resume.CODE,
        commands=("process", "serve", "rescore"),
        first_run=("process",),
        from_run=("rescore",),
    )
    untrained_outcomes: tuple[str, ...] = row(
        (),
        Words(tuple(EndedName)),
        "outcomes masked in training instead of scored 0",
        commands=("process", "serve", "rescore", "export"),
        from_run=("branch", "export", "rescore"),
    )
    trained_segments: Literal["main_line", "all_segments"] | None = row(
        None,
        Choice(("main_line", "all_segments")),
        "which of a rollout's lines of ids are trained; auto: as the trainer can take; docs/training.md",
        unset=AUTO,
        commands=("process", "serve", "rescore", "export"),
        from_run=("branch", "export", "rescore"),
    )
    main_line: MainLine | None = row(
        None,
        Choice(get_args(MainLine)),
        "of a program: which line is trained where a rollout has one; auto: longest; docs/training.md",
        unset=AUTO,
        from_run=("branch",),
        only_for=("program",),
    )
    train_mixed_versions: bool = row(
        True,
        Flag(),
        "train on rollouts that several policy versions sampled; no: they are masked",
        commands=("process", "serve", "rescore", "export"),
        from_run=("branch", "export", "rescore"),
    )
    max_staleness: int | None = row(
        None,
        Integer(0, 1_000_000),
        "groups with a rollout that is more policy versions behind are dropped when they are whole",
        unset="none: the trainer decides",
    )
    drain_timeout: float = row(
        5.0,
        seconds(at_least=0),
        "how long running rollouts may go on after a signal",
        resume=Resume.FREE,
        commands=(*RUNS, *PLAYS),
    )

    @property
    def all_segments(self) -> bool | None:
        """`env.trained_segments` as groups and rows take it. None: it was left open."""
        return None if self.trained_segments is None else self.trained_segments == "all_segments"

    @property
    def branch_rule(self) -> BranchRule | None:
        """`env.branch`, read."""
        return None if self.branch is None else BranchRule.parse(self.branch)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (rule := self.branch_rule) is not None:
            rule.demand_size(self.group_size)
        least = self.group_policy.removeprefix("partial:")
        if least.isdecimal() and int(least) > self.group_size:
            raise ConfigError(
                f"env.group_policy: partial:{least} asks for more rollouts than env.group_size "
                f"({self.group_size}) has"
            )
