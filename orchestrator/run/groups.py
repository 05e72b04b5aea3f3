"""Groups as Atropos' ScoredDataGroup, one JSON line each: readable without this code."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_segment, trajectory
from orchestrator.errors import ConfigError, RecordError
from orchestrator.run.lines import JsonLines
from orchestrator.types import Ended, EndedName, Group, Member, Trajectory, Turn, conversations

log = logging.getLogger(__name__)

MASKED = -100  # "not trained" in Atropos
MASKED_LOGPROB = 1.0  # no log-probability is positive
ASKED_CHARS = 200
MAX_OTHER_SEGMENTS = 20  # rollouts.jsonl has all of them


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How groups become training data.

    `untrained`: outcomes that are masked. `mixed_versions`: whether a rollout that several policy versions sampled
    is trained on. `all_segments`: side lines (plans, rewritten histories) become groups of their own.
    `tokenizer`: makes the trajectories of side lines.
    """

    include_messages: bool = True
    untrained: frozenset[EndedName] = frozenset()
    mixed_versions: bool = True
    all_segments: bool = False
    tokenizer: Tokenizer | None = None

    def groups(self, group: Group) -> list[dict[str, Any]]:
        """The group, and with `all_segments` one more for each side line that all its members have."""
        lines = [scored_data_group(group, self)]
        if self.all_segments:
            lines += [scored_data_group(side, self) for side in side_groups(group, self.tokenizer)]
        return lines


def side_groups(group: Group, tokenizer: Tokenizer | None) -> list[Group]:
    """The members' first side lines as a group, then their second ones, and so on while every member has one.

    A side line that the chat template refuses, or that does not add up, is left out.
    """
    sides = []
    for member in group.members_G:
        turns = member.attempt.record.turns
        others = sorted({t.segment for t in turns} - {member.trajectory.segment})
        tag = member.attempt.plan.agent.closing_tag
        lines = []
        for segment in others:
            try:
                lines.append(trajectory(member.attempt.record, tokenizer, tag, segment))
            except RecordError as error:
                log.warning("rollout %s: no side line: %s", member.attempt.plan.rollout_id, error)
        sides.append([replace(member, trajectory=line) for line in lines])
    return [replace(group, members_G=members) for members in zip(*sides, strict=False)]


def scored_data_group(group: Group, form: GroupFormat | None = None) -> dict[str, Any]:
    """The dict that Atropos' trainers, run-api and tools read."""
    form = form or GroupFormat()
    members = group.members_G
    sampling = members[0].attempt.plan.sampling
    exact = all(m.trajectory.logprobs_T is not None for m in members)
    return {
        "tokens": [list(m.trajectory.tokens_T) for m in members],
        "masks": [_mask(m, form) for m in members],
        "scores": [float(m.score.value) for m in members],
        "inference_logprobs": [_logprobs(m.trajectory) for m in members] if exact else None,
        "messages": [_messages(m.trajectory) for m in members] if form.include_messages else None,
        "advantages": None,
        "ref_logprobs": None,
        "generation_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "n": 1,
        },
        "overrides": [_overrides(m, group) for m in members],
        "group_overrides": {"group_size": len(members)},
    }


def _mask(member: Member, form: GroupFormat) -> list[int]:
    line = member.trajectory
    outcome = member.attempt.outcome
    unwanted = isinstance(outcome, Ended) and outcome.name in form.untrained
    if unwanted or (not form.mixed_versions and len(_versions(member)) > 1):
        return [MASKED] * len(line.tokens_T)
    return [token if trained else MASKED for token, trained in zip(line.tokens_T, line.trained_T, strict=True)]


def _logprobs(line: Trajectory) -> list[float]:
    return [
        logprob if trained else MASKED_LOGPROB
        for logprob, trained in zip(line.logprobs_T or (), line.trained_T, strict=True)
    ]


def _messages(line: Trajectory) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in line.messages]


def _overrides(member: Member, group: Group) -> dict[str, Any]:
    """Facts of one rollout. docs/output.md fixes the names."""
    attempt, record = member.attempt, member.attempt.record
    return {
        "rollout_id": attempt.plan.rollout_id,
        "task_id": group.task.task_id,
        "outcome": str(attempt.outcome.name),
        "agent": attempt.plan.agent.kind,
        "shared_identity": attempt.plan.agent.kind == "program",
        "answer": record.answer,
        "score_parts": dict(member.score.parts),
        "steps": record.action_steps,
        "token_source": member.trajectory.token_source,
        "duration_s": round(record.duration_s, 3),
        "waiting_s": round(record.waiting_s, 3),
        "tool_calls": len(record.tool_calls),
        "prompt_tokens": sum(t.completion.prompt_tokens for t in record.turns),
        "completion_tokens": record.sampled_tokens,
        "policy_version": record.turns[-1].completion.policy_version if record.turns else None,
        "mixed_policy_versions": len(_versions(member)) > 1,
        "segment": member.trajectory.segment,
        "main_segment": main_segment(record.turns, group.task.question) if record.turns else 0,
        "segments": len({t.segment for t in record.turns}),
        "untrained_completions": sum(t.segment != member.trajectory.segment for t in record.turns),
        "other_segments": other_segments(record.turns, member.trajectory.segment),
        "node": record.node or None,
    }


def _versions(member: Member) -> set[str]:
    """The policy versions that sampled this rollout; empty if the endpoint does not name them."""
    return {v for t in member.attempt.record.turns if (v := t.completion.policy_version) is not None}


def other_segments(turns: tuple[Turn, ...], segment: int) -> list[dict[str, Any]]:
    """Summaries of the other segments: plans, managed agents, and whatever a program or its code asked."""
    found: dict[int, dict[str, Any]] = {}
    for turn, talk in zip(turns, conversations(turns), strict=True):
        if turn.segment == segment:
            continue
        other = found.setdefault(
            turn.segment,
            {
                "segment": turn.segment,
                "kind": str(turn.kind),
                "agent": turn.agent,
                "asked": talk[-1].content[:ASKED_CHARS] if talk else "",
                "completions": 0,
                "completion_tokens": 0,
            },
        )
        other["completions"] += 1
        other["completion_tokens"] += turn.completion.completion_tokens
    return list(found.values())[:MAX_OTHER_SEGMENTS]


class GroupsFile:
    """The file that training reads. Groups are appended to it."""

    def __init__(self, path: Path, *, form: GroupFormat | None = None, fsync: bool = False) -> None:
        self.path = path
        self._form = form or GroupFormat()
        self._lines = JsonLines(path, fsync=fsync)

    async def append(self, group: Group) -> None:
        """Appends a group: one line, more with `all_segments`. All are on disk when this returns."""
        await self._lines.append(lambda: self._form.groups(group))

    async def append_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends the finished lines of a group. They are on disk when this returns."""
        await self._lines.append(lambda: lines)

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()


def check_writable(folder: Path) -> None:
    """Checks that `folder` can be made and written, without making it. Raises ConfigError."""
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
    """A new empty file: `path`, or with `_1`, `_2` … before its ending if that exists, as Atropos names files.

    It is made here, with its folder, so that no other process takes the name. Raises ConfigError.
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
