"""What Weights & Biases is told, by names that sort: `train/`, `rollout/`, `sandbox/`, `serve/`, `eval/`.

Online, offline and disabled are wandb's own (`WANDB_MODE`). Nothing about it may end a run: without a login the
run is kept offline and said so once; what fails later switches it off and is said once.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.types import Attempt, Group, Member


@dataclass(slots=True)
class Metrics:
    """What happened since it was told last."""

    rewards: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # standard deviation of each group's rewards
    correct: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    launches_s: list[float] = field(default_factory=list)
    equal_groups: int = 0
    dropped_groups: int = 0

    def attempt(self, result: Member | Attempt) -> None:
        """One attempt is over."""
        attempt = result.attempt if isinstance(result, Member) else result
        record = attempt.record
        self.outcomes[str(attempt.outcome.name)] += 1
        if not isinstance(result, Member):
            return
        self.rewards.append(result.score.value)
        if "correctness" in result.score.parts:
            self.correct.append(result.score.parts["correctness"])
        self.steps.append(sum(turn.kind == "action" for turn in record.turns))
        self.sampled.append(record.sampled_tokens)
        self.durations_s.append(record.duration_s)
        self.waits_s.append(record.waiting_s)
        self.launches_s.append(record.launch_s)

    def group(self, group: Group) -> None:
        """One group is over."""
        if group.dropped is not None:
            self.dropped_groups += 1
            return
        rewards = [member.score.value for member in group.members_G]
        self.spreads.append(statistics.pstdev(rewards))
        self.equal_groups += len(set(rewards)) == 1 and len(rewards) > 1

    def taken(self) -> dict[str, float]:
        """All of it by name; the next ones begin anew."""
        told: dict[str, float] = {
            "train/groups_dropped": self.dropped_groups,
            "train/groups_of_equal_rewards": self.equal_groups,
        }
        means: Mapping[str, list[float] | list[int]] = {
            "train/reward_mean": self.rewards,
            "train/reward_std_in_group": self.spreads,
            "train/correct": self.correct,
            "rollout/steps": self.steps,
            "rollout/tokens_sampled": self.sampled,
            "rollout/seconds": self.durations_s,
            "rollout/seconds_waiting": self.waits_s,
            "sandbox/seconds_to_launch": self.launches_s,
        }
        told |= {name: statistics.fmean(values) for name, values in means.items() if values}
        total = sum(self.outcomes.values())
        told |= {f"rollout/outcome/{name}": count / total for name, count in self.outcomes.items()}
        for row in fields(self):
            setattr(self, row.name, getattr(Metrics(), row.name))
        return told


@dataclass(slots=True)
class Tracking:
    """One wandb run, or none. `say` is given a line when it is not what was asked for."""

    wanted: bool
    directory: Path
    say: Callable[[str], None]
    _open: bool = False

    async def open(self, *, name: str | None, project: str, group: str | None, config: Mapping[str, Any]) -> bool:
        """Whether there is a run now. Never raises for what is wandb's."""
        if not self.wanted or self._open:
            return self._open
        try:
            await asyncio.to_thread(self._init, name, project, group, config)
            self._open = True
        except Exception as error:
            self._give_up(error)
        return self._open

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Nothing without a run."""
        if not self._open:
            return
        import wandb

        try:
            wandb.log(dict(metrics), step=step)
        except Exception as error:
            self._give_up(error)

    async def close(self) -> None:
        """What is not sent yet is."""
        if not self._open:
            return
        import wandb

        self._open = False
        try:
            await asyncio.to_thread(wandb.finish)
        except Exception as error:
            self._give_up(error)

    def _init(self, name: str | None, project: str, group: str | None, config: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not _logged_in():
            mode = "offline"
            self.say(
                f"wandb: no login; metrics are kept in {self.directory / 'wandb'}, to be sent with `wandb sync`; "
                "`wandb login` before the start sends them at once"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        wandb.init(
            name=name, project=project, group=group, config=dict(config), dir=str(self.directory), mode=mode
        )

    def _give_up(self, error: Exception) -> None:
        self.wanted = self._open = False
        reason = " ".join(str(error).split())[:300]
        self.say(f"wandb is switched off: {type(error).__name__}: {reason}")


def _logged_in() -> bool:
    """Asked before `init`, which would put the question to a terminal."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions know no such question
        return bool(wandb.api.api_key)
