"""Weights & Biases never ends a run, and is told by names that stay."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from orchestrator.atropos import tracking as tracking_module
from orchestrator.atropos.tracking import Metrics, Tracking
from orchestrator.types import Attempt, Failed, FailedName, Group
from tests.fakes.plans import a_member, a_plan, an_attempt


def begin(tracking: Tracking) -> None:
    tracking.open(name="n", project="p", group="g", config={"group_size": 2})


async def test_what_fails_switches_it_off_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    tracking = Tracking(True, tmp_path, said.append)
    begin(tracking)
    begin(tracking)
    tracking.log({"a": 1}, step=1)
    await tracking.close()
    tracking.log({"a": 2}, step=2)
    (line,) = said
    assert line.startswith("wandb is switched off")


async def test_a_full_queue_takes_the_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread waits for more, and `close` for the thread."""
    monkeypatch.setattr(tracking_module, "MOST_WAITING", 1)
    gate, logged, said = threading.Event(), list[int](), list[str]()

    class Slow(Tracking):
        def _run(self, *_: object) -> None:
            gate.wait(60)
            while (report := self._logged.get()) is not None:
                logged.append(report[1])

    tracking = Slow(True, tmp_path, said.append)
    begin(tracking)
    tracking.log({"a": 1}, step=1)
    closing = asyncio.create_task(tracking.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert (logged, said) == ([1], [])


def test_metrics_are_of_what_happened_since_the_last_time() -> None:
    metrics = Metrics()
    member = a_member()
    broken = Attempt(a_plan(), an_attempt().record, Failed(FailedName.LLM_ERROR, "away"))
    metrics.attempt(member)
    metrics.attempt(broken)
    metrics.group(Group(0, a_plan().task, (member,), ()))
    told = metrics.taken()
    assert told["train/reward_mean"] == member.score.value
    assert told[f"rollout/outcome/{member.attempt.outcome.name}"] == told["rollout/outcome/llm_error"] == 0.5
    assert told["train/groups_dropped"] == 0
    again = metrics.taken()
    assert "train/reward_mean" not in again
    assert not any(name.startswith("rollout/outcome") for name in again)
