"""The metrics for Weights & Biases, by names that sort: `train/`, `rollout/`, `sandbox/`, `serve/`, `eval/`.

wandb's own `WANDB_MODE` sets online, offline or disabled. wandb must not end a run or hold one up: without a
login, and where its server gives no answer at the start, metrics are kept offline; a later failure switches it
off. Each is said once.
"""

import asyncio
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from orchestrator.rules.observer import Listener
from orchestrator.types import Attempt, FailedName, Group, Member, RolloutPlan

_WAITS_S = {"init_timeout": 30.0, "finish_timeout": 60.0}
CLOSE_S = 120.0
MOST_WAITING = 1000  # reports in the queue


class SandboxTime(Listener):
    """How long sandboxes ran for rollouts that were cancelled before their end."""

    def __init__(self) -> None:
        self.thrown_away_s = 0.0
        self._begun_at: dict[str, float] = {}

    def begun(self, plan: RolloutPlan, node: str) -> None:
        """Notes when the rollout got its sandbox."""
        self._begun_at[plan.rollout_id] = time.time()

    def attempt(self, result: Member | Attempt) -> None:
        """Counts its time if it was cancelled and left nothing to grade."""
        attempt = result.attempt if isinstance(result, Member) else result
        begun_at = self._begun_at.pop(attempt.plan.rollout_id, None)
        lost = attempt.outcome.name is FailedName.CANCELLED and attempt.ungraded is None
        if begun_at is not None and lost:
            self.thrown_away_s += time.time() - begun_at


@dataclass(slots=True)
class Metrics(Listener):
    """What happened since the last call of `taken`."""

    rewards: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # standard deviation of each group's rewards
    correct: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    launches_s: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # of rollouts of whole groups, in policy versions
    equal_groups: int = 0
    dropped_groups: int = 0
    kept_completions: int = 1000  # length of the rolling `completions_s`, which `taken` does not clear
    completions_s: deque[float] = field(default_factory=deque)

    def attempt(self, result: Member | Attempt) -> None:
        attempt = result.attempt if isinstance(result, Member) else result
        record = attempt.record
        self.outcomes[str(attempt.outcome.name)] += 1
        self.completions_s.extend(turn.ended_s - turn.started_s for turn in record.own_turns)
        while len(self.completions_s) > self.kept_completions:
            self.completions_s.popleft()
        if not isinstance(result, Member):
            return
        self.rewards.append(result.score.value)
        self.correct.append(float(result.score.solved))
        self.steps.append(record.action_steps)
        self.sampled.append(record.sampled_tokens)
        self.durations_s.append(record.duration_s)
        self.waits_s.append(record.waiting_s)
        self.launches_s.append(record.launch_s)

    def group(self, group: Group) -> None:
        if group.dropped is not None:
            self.dropped_groups += 1
            return
        self.staleness += [member.staleness for member in group.members_G if member.staleness is not None]
        rewards = [member.score.value for member in group.members_G]
        self.spreads.append(statistics.pstdev(rewards))
        self.equal_groups += len(set(rewards)) == 1 and len(rewards) > 1

    def taken(self) -> dict[str, float]:
        """All metrics by name; counting then begins anew."""
        metrics: dict[str, float] = {
            "train/groups_dropped": self.dropped_groups,
            "train/groups_of_equal_rewards": self.equal_groups,
        }
        means: Mapping[str, list[float] | list[int]] = {
            "train/reward_mean": self.rewards,
            "train/staleness_mean": self.staleness,
            "train/reward_std_in_group": self.spreads,
            "train/correct": self.correct,
            "rollout/steps": self.steps,
            "rollout/tokens_sampled": self.sampled,
            "rollout/seconds": self.durations_s,
            "rollout/seconds_waiting": self.waits_s,
            "sandbox/seconds_to_launch": self.launches_s,
        }
        metrics |= {name: statistics.fmean(values) for name, values in means.items() if values}
        if self.staleness:
            metrics["train/staleness_max"] = max(self.staleness)
        total = sum(self.outcomes.values())
        metrics |= {f"rollout/outcome/{name}": count / total for name, count in self.outcomes.items()}
        if len(self.completions_s) > 1:
            metrics["server/request_time_avg"] = statistics.fmean(self.completions_s)
            metrics["server/request_time_std"] = statistics.pstdev(self.completions_s)
            metrics["server/request_time_99p"] = statistics.quantiles(self.completions_s, n=100)[-1]
        fresh = Metrics()
        for row in fields(self):
            if row.name not in ("kept_completions", "completions_s"):
                setattr(self, row.name, getattr(fresh, row.name))
        return metrics


@dataclass(slots=True)
class Tracking:
    """One wandb run, or none. `say` gets a line when the run is not what was asked for.

    All calls of wandb are made in one thread of their own: logging a table waits for wandb's server.
    """

    wanted: bool
    directory: Path
    say: Callable[[str], None]
    _logged: SimpleQueue[tuple[Mapping[str, Any], int] | None] = field(default_factory=SimpleQueue)
    _ended: asyncio.Future[None] | None = None  # done when the thread has ended

    def open(self, **about: Any) -> None:
        """Begins the run, once. `about`: name, project, group and config, as wandb takes them."""
        if not self.wanted or self._ended is not None:
            return
        loop = asyncio.get_running_loop()
        ended = self._ended = loop.create_future()

        def run() -> None:
            try:
                self._run(about)
            except Exception as error:
                self._give_up(error)
            finally:
                with suppress(RuntimeError):  # `close` gave up, and the loop is closed
                    loop.call_soon_threadsafe(ended.set_result, None)

        # A daemon thread: the process' end waits for wandb's server no longer than `close` does.
        Thread(target=run, name="wandb", daemon=True).start()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Queues metrics; without a run does nothing."""
        if not self.wanted or self._ended is None:
            return
        if self._logged.qsize() < MOST_WAITING:
            self._logged.put((dict(metrics), step))
        else:
            self._give_up(TimeoutError(f"{MOST_WAITING} reports wait to be sent"))

    async def close(self) -> None:
        """Waits until queued metrics are sent, for at most CLOSE_S."""
        if self._ended is None:
            return
        self._logged.put(None)
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self.say("wandb takes too long to end; what it has not sent is left to `wandb sync`")

    def _run(self, about: Mapping[str, Any]) -> None:
        import wandb

        self._init(about)
        while (logged := self._logged.get()) is not None and self.wanted:
            metrics, step = logged
            wandb.log(dict(metrics), step=step)
        wandb.finish()

    def _init(self, about: Mapping[str, Any]) -> None:
        import wandb

        def init(mode: Any) -> None:
            wandb.init(**about, dir=str(self.directory), mode=mode, settings=_waits())

        mode = os.environ.get("WANDB_MODE") or "online"
        self.directory.mkdir(parents=True, exist_ok=True)
        kept = f"metrics are kept in {self.directory / 'wandb'}, to be sent with `wandb sync`"
        if mode == "online" and not _logged_in():
            mode = "offline"
            self.say(f"wandb: no login; {kept}; `wandb login` before the start sends them at once")
        try:
            init(mode)
        except wandb.errors.CommError as error:
            self.say(f"wandb: {_line(error)}; {kept}")
            init("offline")

    def _give_up(self, error: Exception) -> None:
        self.wanted = False
        self.say(f"wandb is switched off: {type(error).__name__}: {_line(error)}")


def _waits() -> Any:
    """Limits: by default wandb waits 90 s at the start, and without limit at the end."""
    import wandb

    settings = getattr(wandb.Settings, "model_fields", {})  # older versions have not all of them
    set_outside = {name for name in _WAITS_S if os.environ.get(f"WANDB_{name.upper()}")}
    waits: dict[str, Any] = {
        name: s for name, s in _WAITS_S.items() if name in settings and name not in set_outside
    }
    return wandb.Settings(**waits)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _logged_in() -> bool:
    """Asked before `init`, which would prompt for a login on a terminal."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions have no `prompt`
        return bool(wandb.api.api_key)
