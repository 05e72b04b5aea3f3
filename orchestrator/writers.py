"""Groups as Atropos' ScoredDataGroup, one JSON line each: readable without this code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.completion.recorder import main_segment
from orchestrator.errors import ConfigError
from orchestrator.jsonl import JsonLines
from orchestrator.types import Ended, EndedName, Group, Member, Trajectory

MASKED = -100  # what Atropos and the trainers behind it take for "not trained"
MASKED_LOGPROB = 1.0  # no log-probability is positive


def scored_data_group(
    group: Group, *, include_messages: bool = True, untrained: frozenset[EndedName] = frozenset()
) -> dict[str, Any]:
    """The dict Atropos' trainers, run-api and tools read. n = members, L_i = tokens of one."""
    members = group.members_G
    exact = all(m.trajectory.logprobs_T is not None for m in members)
    return {
        "tokens": [list(m.trajectory.tokens_T) for m in members],
        "masks": [_mask(m, untrained) for m in members],
        "scores": [float(m.score.value) for m in members],
        "inference_logprobs": [_logprobs(m.trajectory) for m in members] if exact else None,
        "messages": [_messages(m.trajectory) for m in members] if include_messages else None,
        "advantages": None,
        "ref_logprobs": None,
        "generation_params": _generation_params(members),
        "overrides": [_overrides(m, group) for m in members],
        "group_overrides": {"group_size": len(members)},
    }


def _mask(member: Member, untrained: frozenset[EndedName]) -> list[int]:
    line = member.trajectory
    outcome = member.attempt.outcome
    if isinstance(outcome, Ended) and outcome.name in untrained:
        return [MASKED] * len(line.tokens_T)
    return [token if trained else MASKED for token, trained in zip(line.tokens_T, line.trained_T, strict=True)]


def _logprobs(line: Trajectory) -> list[float]:
    return [
        logprob if trained else MASKED_LOGPROB
        for logprob, trained in zip(line.logprobs_T or (), line.trained_T, strict=True)
    ]


def _messages(line: Trajectory) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in line.messages]


def _generation_params(members: tuple[Member, ...]) -> dict[str, Any]:
    sampling = members[0].attempt.plan.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "n": 1,
    }


def _overrides(member: Member, group: Group) -> dict[str, Any]:
    """The facts of one rollout. Names are fixed by the docs."""
    attempt, record = member.attempt, member.attempt.record
    versions = {t.completion.policy_version for t in record.turns} - {None}
    return {
        "rollout_id": attempt.plan.rollout_id,
        "task_id": group.task.task_id,
        "outcome": str(attempt.outcome.name),
        "answer": record.answer,
        "score_parts": dict(member.score.parts),
        "steps": sum(t.kind == "action" for t in record.turns),
        "token_source": member.trajectory.token_source,
        "duration_s": round(record.duration_s, 3),
        "waiting_s": round(record.waiting_s, 3),
        "tool_calls": len(record.tool_calls),
        "prompt_tokens": sum(t.completion.prompt_tokens for t in record.turns),
        "completion_tokens": record.sampled_tokens,
        "policy_version": record.turns[-1].completion.policy_version if record.turns else None,
        "mixed_policy_versions": len(versions) > 1,
        "segments": len({t.segment for t in record.turns}),
        "untrained_completions": _untrained(member),
        "node": None,
    }


def _untrained(member: Member) -> int:
    """Completions that were sampled in another segment than the one trained on."""
    turns = member.attempt.record.turns
    return sum(t.segment != main_segment(turns) for t in turns) if turns else 0


class GroupsFile:
    """The file training reads; what is in it already stays."""

    def __init__(
        self,
        path: Path,
        *,
        include_messages: bool = True,
        untrained: frozenset[EndedName] = frozenset(),
        fsync: bool = False,
    ) -> None:
        self.path = path
        self._include_messages = include_messages
        self._untrained = untrained
        self._lines = JsonLines(path, fsync=fsync)

    def append(self, group: Group) -> None:
        """One line, on disk when this returns."""
        self._lines.append(
            scored_data_group(group, include_messages=self._include_messages, untrained=self._untrained)
        )

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()


def check_writable(folder: Path) -> None:
    """Whether `folder` can be made and written, without making it. Raises ConfigError."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{existing} is a file, so {folder} cannot be a folder for output")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the folder {existing} is not writable; set --env.data_path_to_save_groups and --env.run_dir"
        )


def fresh_path(path: Path) -> Path:
    """An empty file: `path`, or with `_1`, `_2` … before its ending when it exists, as Atropos names them.

    Made here with its folder, so that nobody else takes the name. Raises ConfigError.
    """
    number, fresh = 0, path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                fresh.touch(exist_ok=False)
                return fresh
            except FileExistsError:
                number += 1
                fresh = path.with_name(f"{path.stem}_{number}{path.suffix}")
    except OSError as error:
        raise ConfigError(f"cannot make {fresh}: {error.strerror}") from error
