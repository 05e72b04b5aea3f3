"""Atropos' own names (BaseEnvConfig) that have an effect in `serve` alone, or nearly.

Commands that sample take them all, as its users bring their command lines. A test compares them with the installed
version of Atropos.
"""

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.settings.kinds import SHARE, URL, Choice, Flag, Integer, Number, Text, seconds
from orchestrator.settings.row import ATROPOS, Resume, row
from orchestrator.settings.section import Settings

_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9][\w.-]*|\[[0-9a-fA-F:]+\]):[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True, repr=False)
class AtroposSettings(Settings, group=ATROPOS, resume=Resume.FREE, commands=("serve",)):
    """How a trainer is fed through Atropos' run-api."""

    rollout_server_url: str = row(
        "http://localhost:8000",
        URL,
        "Atropos' run-api, which hands groups to the trainer",
        resume=Resume.FREE_CONFIRM,
        first_run=("serve",),
    )
    policy_address: str | None = row(
        None,
        Text("of the form HOST:PORT, as 127.0.0.1:8900", "HOST:PORT", _HOST_AND_PORT.fullmatch),
        "`serve` listens here for the trainer's new policy versions: POST /policy; docs/training.md",
        resume=Resume.FREE_CONFIRM,
    )
    max_num_workers: int = row(
        -1, Integer(1, special=(-1,)), "groups at a time; -1: max_num_workers_per_node for each endpoint"
    )
    max_num_workers_per_node: int = row(
        -1, Integer(1, special=(-1,)), "groups at a time per endpoint; -1: as many as the sandboxes allow"
    )
    max_eval_workers: int = row(16, Integer(1), "evaluation tasks at a time")
    max_batches_offpolicy: int = row(3, Integer(1), "batches that may wait for the trainer")
    batch_size: int = row(-1, Integer(1, special=(-1,)), "-1: the trainer says", resume=Resume.FREE_DATA)
    min_batch_allocation: float | None = row(
        None, SHARE, "least part of a batch from here", resume=Resume.FREE_DATA
    )
    inference_weight: float = row(1.0, Number(), "of this environment; -1: ignored", resume=Resume.FREE_DATA)
    worker_timeout: float = row(
        -1.0,
        seconds(above=0, special=(-1.0,)),
        "wall clock of each rollout of a group, if shorter than env.rollout_deadline; -1: none",
        resume=Resume.FREE_DATA,
    )
    steps_per_eval: int = row(100, Integer(1), "trainer steps between two evaluations", resume=Resume.FREE_DATA)
    eval_handling: Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"] = row(
        "STOP_TRAIN",
        Choice(("STOP_TRAIN", "LIMIT_TRAIN", "NONE")),
        "what an evaluation does to training rollouts",
        resume=Resume.FREE_DATA,
    )
    eval_limit_ratio: float = row(0.5, SHARE, "part of the sandboxes left by LIMIT_TRAIN", resume=Resume.FREE_DATA)
    ensure_scores_are_not_same: bool = row(False, Flag(), "drop groups of equal scores", resume=Resume.FREE_DATA)
    use_wandb: bool = row(False, Flag(), "report to Weights & Biases", resume=Resume.FREE_CONFIRM)
    wandb_name: str | None = row("smolagents", Text(), "name to be grouped by", unset="none")
    num_rollouts_to_keep: int = row(32, Integer(0), "rollouts shown in Weights & Biases")
    num_rollouts_per_group_for_logging: int = row(
        1, Integer(1, special=(-1,)), "rollouts of a group shown there; -1: all"
    )
    min_items_sent_before_logging: int = row(2, Integer(), "0 or less: log every time")
