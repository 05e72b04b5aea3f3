"""The run directory: what a run was asked, and everything that happened, enough to resume, re-score,
replay and view it.

    run.json        configuration without secrets, versions, image
    rollouts.jsonl  one line per attempt, bad tasks included
    output/         what rollouts left in `output/`, a folder for each that left something
    groups.jsonl    the groups file, unless it was asked for elsewhere
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from orchestrator import jsonl
from orchestrator.errors import ConfigError, RunLocked
from orchestrator.types import Attempt, BadTask, Ended, Member, RolloutPlan, ToolCall, Turn

SCHEMA = 1
_TOOL_CALL = [field.name for field in fields(ToolCall)]  # `asdict` would copy the arguments, value by value


class RunDirectory:
    """Owned by one orchestrator at a time. Closing lets go of the lock.

    With `resume` it holds a run that is gone on with, and what its process left unfinished is set aside;
    else it must hold none. Raises RunLocked, ConfigError.
    """

    def __init__(self, path: Path, *, resume: bool = False, fsync: bool = False) -> None:
        self.path = path
        self.rollouts = path / "rollouts.jsonl"
        self._fsync = fsync
        self._lock = _locked(path)
        try:
            if resume:
                jsonl.set_torn_end_aside(self.rollouts)
            elif self.rollouts.exists() and self.rollouts.stat().st_size:
                raise ConfigError(
                    f"env.run_dir: {path} holds a run; go on with it by --env.resume {path}, or name another one"
                )
            self._lines = jsonl.JsonLines(self.rollouts, fsync=fsync)
        except BaseException:
            os.close(self._lock)
            raise

    def describe(self, facts: dict[str, Any]) -> None:
        """Writes run.json, whole or not at all. Raises ConfigError."""
        draft = self.path / "run.json.part"
        try:
            with draft.open("wb") as file:
                file.write(jsonl.dumps({"schema": SCHEMA, **facts}, indent=True) + b"\n")
                file.flush()
                if self._fsync:
                    os.fsync(file.fileno())
            draft.replace(self.path / "run.json")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path / 'run.json'}: {error.strerror}") from error

    def record(self, result: Member | Attempt, *, full_traces: bool = True) -> None:
        """One attempt, on disk when this returns. Without `full_traces` the sandbox's own account of its
        steps is left out: what was served is all in the completions."""
        line = rollout_line(result)
        self._lines.append(line if full_traces else {**line, "steps": []})

    def record_bad_task(self, task: BadTask, group: int) -> None:
        """A row no rollout could be made of."""
        self._lines.append(
            {
                "schema": SCHEMA,
                "rollout_id": f"g{group:06d}",
                "task_id": task.task_id,
                "group": group,
                "outcome": "bad_task",
                "reason": task.reason,
            }
        )

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(path: Path) -> int:
    """A file descriptor that holds the lock until it is closed, or its process ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunLocked(f"another orchestrator works in {path}; set --env.run_dir to a new one") from error
    return lock


def new_run_directory(root: Path = Path("runs")) -> Path:
    """A name nobody has: the time, and a number where one second is not enough."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    path, number = root / stamp, 1
    while path.exists():
        path, number = root / f"{stamp}-{number}", number + 1
    return path


def rollout_line(result: Member | Attempt) -> dict[str, Any]:
    """One line of rollouts.jsonl."""
    member = result if isinstance(result, Member) else None
    attempt = result.attempt if isinstance(result, Member) else result
    plan, record, outcome = attempt.plan, attempt.record, attempt.outcome
    return {
        "schema": SCHEMA,
        "rollout_id": plan.rollout_id,
        "task_id": plan.task.task_id,
        "level": plan.task.level,
        "source": plan.task.source,
        "group": plan.group,
        "index": plan.index,
        "attempt": plan.attempt,
        "outcome": str(outcome.name),
        "reason": outcome.detail if isinstance(outcome, Ended) else outcome.reason,
        "answer": record.answer,
        "score": member.score.value if member else None,
        "score_parts": dict(member.score.parts) if member else None,
        "score_evidence": dict(member.score.evidence) if member and member.score.evidence else None,
        "token_source": member.trajectory.token_source if member else None,
        "started_at": record.started_at,
        "launch_s": record.launch_s,
        "duration_s": record.duration_s,
        "waiting_s": record.waiting_s,
        "cpu_s": record.cpu_s,
        "sandbox": {"id": record.sandbox_id, "exit": asdict(record.exit) if record.exit else None},
        "plan": _plan(plan),
        "completions": [_completion(turn) for turn in record.turns],
        "tool_calls": [{name: getattr(call, name) for name in _TOOL_CALL} for call in record.tool_calls],
        "steps": [asdict(step) for step in record.steps],
        "output": asdict(record.output) if record.output else None,
        "notes": list(record.notes),
    }


def _plan(plan: RolloutPlan) -> dict[str, Any]:
    """How the rollout was to go. The task is named, not told: its answer stays in the data set."""
    return {
        "sampling": asdict(plan.sampling),
        "agent": asdict(plan.agent),
        "sandbox": asdict(plan.sandbox),
        "limits": asdict(plan.limits),
    }


def _completion(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "sequence": turn.sequence,
        "kind": str(turn.kind),
        "agent": turn.agent,
        "kept": turn.kept,
        "messages": [{"role": m.role, "content": m.content} for m in turn.messages],
        "segment": turn.segment,
        "prompt_ids": turn.prompt_ids,
        "closing": turn.closing,
        "text": completion.text,
        "visible": completion.visible,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.tokens_T,
        "logprobs": completion.logprobs_T,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "policy_version": completion.policy_version,
        "started_s": turn.started_s,
        "ended_s": turn.ended_s,
        "retries": turn.completion.retries,
    }
