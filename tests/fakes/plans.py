"""Plans, records and results for tests that are not about how they come about."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from orchestrator.settings.config import Config
from orchestrator.types import (
    STORAGE_INODES,
    AgentSpec,
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Limits,
    Member,
    Message,
    Outcome,
    Record,
    RolloutPlan,
    Sampling,
    SandboxSpec,
    Score,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.completers import text_completion

CONFIG = Config()
LIMITS = CONFIG.limits()
TALK = (Message("system", "You are an agent."), Message("user", "What is 6 times 7?"))


def an_agent(**changes: Any) -> AgentSpec:
    """As the settings have it by default, but for these fields."""
    return replace(CONFIG.agent_spec(), **changes)


def some_limits(**changes: Any) -> Limits:
    return replace(LIMITS, **changes)


def a_sandbox(image: str, **changes: Any) -> SandboxSpec:
    return replace(CONFIG.sandbox_spec(), image=image, **changes)


# What an ordinary user cannot keep apart where agents are root inside.
WAIVED_WITHOUT_ROOT = frozenset({"id_ranges"}) if os.geteuid() else frozenset()


def a_writable_sandbox(image: str, **changes: Any) -> SandboxSpec:
    storage = {"storage_bytes": 64 << 20, "storage_inodes": STORAGE_INODES}
    return a_sandbox(image, **{"root": "writable", **storage, **changes})


def a_plan(index: int = 0, attempt: int = 0, **changes: object) -> RolloutPlan:
    plan = RolloutPlan(
        rollout_id=f"g000000-r{index:02d}-a{attempt}",
        task=Task("task", "What is 6 times 7?", "42"),
        group=0,
        index=index,
        attempt=attempt,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=100, seed=1000 * index),
        agent=an_agent(),
        sandbox=a_sandbox("image"),
        limits=some_limits(),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def a_turn(text: str = "Thought\n<code>1</code>", sequence: int = 1, completion: Completion | None = None) -> Turn:
    return Turn(
        sequence=sequence,
        kind=CompletionKind.ACTION,
        kept=0,
        messages=TALK,
        segment=0,
        prompt_ids=None,
        closing="",
        completion=completion or text_completion(text),
        started_s=0.0,
        ended_s=1.0,
    )


def a_record(turns: int = 1, **changes: object) -> Record:
    record = Record(started_at=0.0, turns=tuple(a_turn(sequence=i + 1) for i in range(turns)), duration_s=10.0)
    return replace(record, **changes)  # type: ignore[arg-type]


def an_attempt(outcome: Outcome | None = None, index: int = 0, attempt: int = 0) -> Attempt:
    return Attempt(a_plan(index, attempt), a_record(), outcome or Ended(EndedName.FINISHED))


def a_member(index: int = 0, score: float = 1.0) -> Member:
    line = Trajectory((1, 2, 3), (False, True, True), (1.0, -0.5, -0.1), TALK, "sampled")
    return Member(an_attempt(index=index), line, Score(score, {"correctness": score}))
