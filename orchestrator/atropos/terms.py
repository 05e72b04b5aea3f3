"""How a trainer is fed according to the settings, and which settings cannot feed any trainer."""

import math
from dataclasses import dataclass

from orchestrator.atropos.rows import AtroposSettings
from orchestrator.engine.groups import open_groups
from orchestrator.errors import ConfigError
from orchestrator.settings.table import EnvSettings
from orchestrator.settings.tasks import TaskSettings
from orchestrator.types import Task


@dataclass(frozen=True, slots=True)
class Terms:
    """How to feed. `workers`: groups that may be under way; None: as many as the sandboxes keep busy. `total`:
    groups to deliver; None: no end.

    `worker_timeout_s`: time limit of a group whose rollouts have `deadline_s` each; a task may set at most
    `longest_s`. `share_in_eval`: the sandboxes that training has during an evaluation.
    """

    name: str
    group_size: int
    max_token_length: int
    workers: int | None
    worker_timeout_s: float
    deadline_s: float = math.inf
    longest_s: float = math.inf
    total: int | None = None
    batch_size: int | None = None
    max_batches: int = 3
    weight: float = 1.0
    allocation: float | None = None
    steps_per_eval: int = 0
    stop_for_eval: bool = True
    share_in_eval: float = 0.0

    def time_limit_s(self, task: Task) -> float:
        """Time limit of this task's group: longer where the task gives its rollouts a longer deadline."""
        own_s = min(float(task.limits.get("rollout_deadline", 0.0)), self.longest_s)
        return self.worker_timeout_s * max(1.0, own_s / self.deadline_s)


def check_batch_size(batch_size: int, group_size: int) -> None:
    """Raises ConfigError where the run-api could never make a batch of whole groups."""
    if batch_size % group_size:
        below = max((n for n in range(1, group_size) if batch_size % n == 0), default=1)
        raise ConfigError(
            f"env.group_size: groups of {group_size} never fill the trainer's batches of {batch_size}; set "
            f"--env.group_size {below}, or the trainer's batch size to a multiple of {group_size}"
        )


def check_servable(env: EnvSettings) -> None:
    """Raises ConfigError for settings that cannot feed any trainer."""
    if env.group_policy.startswith("partial"):
        raise ConfigError(
            "env.group_policy: the run-api keeps groups back that are not of env.group_size; use backfill or drop"
        )
    if env.tokenizer_name is not None and env.tokenizer_name.lower() == "none":
        raise ConfigError("env.tokenizer_name: a trainer needs token ids; name the model's tokenizer")
    if env.inference_weight == 0:
        raise ConfigError("env.inference_weight: the run-api divides by it; set it above 0")
    if env.batch_size > 0:
        check_batch_size(env.batch_size, env.group_size)


def terms_of(env: EnvSettings, *, servers: int, sandboxes: int, evaluates: bool) -> Terms:
    """The terms by the settings, the number of endpoints, and that of sandboxes at the start.

    A group's time limit is longer than its rollouts can take: they end by their own deadlines, and none is drawn
    again for being slow."""
    workers = _most_workers(env, servers)
    groups = min(open_groups(env, sandboxes), math.inf if workers is None else workers)
    deadline_s = min(env.rollout_deadline, env.worker_timeout if env.worker_timeout > 0 else math.inf)
    # Every rollout may use up its deadline, be tried again and be replaced, and wait for those of other groups.
    turns = math.ceil(groups * env.group_size / max(1, sandboxes))  # 0: the nodes are all away just now
    return Terms(
        name=name_of(env),
        group_size=env.group_size,
        max_token_length=env.max_token_length,
        workers=workers,
        deadline_s=deadline_s,
        longest_s=env.worker_timeout if env.worker_timeout > 0 else math.inf,
        worker_timeout_s=deadline_s * (env.max_retries + 1) * 2 * turns + 600.0,
        total=total(env),
        batch_size=env.batch_size if env.batch_size > 0 else None,
        max_batches=env.max_batches_offpolicy,
        weight=env.inference_weight if env.inference_weight > 0 else 1.0,
        allocation=env.min_batch_allocation,
        steps_per_eval=env.steps_per_eval if evaluates else 0,
        stop_for_eval=env.eval_handling == "STOP_TRAIN",
        share_in_eval=env.eval_limit_ratio if env.eval_handling == "LIMIT_TRAIN" else 1.0,
    )


def _most_workers(env: AtroposSettings, servers: int) -> int | None:
    """How many groups may be under way by Atropos' settings for it."""
    if env.max_num_workers > 0:
        return env.max_num_workers
    each = env.max_num_workers_per_node
    return each * servers if each > 0 else None


def total(env: TaskSettings) -> int | None:
    return env.total_steps if env.total_steps > 0 else None


def name_of(env: AtroposSettings) -> str:
    return env.wandb_name or "smolagents"
