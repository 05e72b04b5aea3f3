"""Groups as Atropos' ScoredDataGroup, one JSON line each: readable without this code."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import (
    TurnTalk,
    in_lines,
    main_segment,
    sampled_by,
    sampled_tokens,
    side_lines,
    trajectory,
    untrained_share,
)
from orchestrator.errors import ConfigError, RecordError
from orchestrator.rules.forks import BranchRule
from orchestrator.run.frames import SUFFIX, is_compressed
from orchestrator.run.lines import JsonLines
from orchestrator.run.trees import InTree, in_trees, own_from
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.types import AgentKind, Ended, EndedName, Group, Member, Outcome, Record, Sampling, Trajectory

log = logging.getLogger(__name__)

MASKED = -100  # "not trained" in Atropos
MASKED_LOGPROB = 1.0  # no log-probability is positive
ASKED_CHARS = 200
MAX_OTHER_SEGMENTS = 20  # rollouts.jsonl has all of them

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How groups become training data.

    `untrained`: outcomes that are masked. `mixed_versions`: whether a rollout that several policy versions sampled
    is trained on. `all_segments`: side lines (plans, managed agents, rewritten histories) are trained on too, and
    become groups of their own in a groups file. None: those of programs are, where a rollout may have several
    lines; a groups file has main lines alone. `tokenizer`: makes the trajectories of side lines. `trunk_masked`:
    what branches share with the rollout that they branch from is not trained there either.
    """

    include_messages: bool = True
    untrained: frozenset[EndedName] = frozenset()
    mixed_versions: bool = True
    all_segments: bool | None = None
    tokenizer: Tokenizer | None = None
    trunk_masked: bool = False

    @classmethod
    def of(
        cls, env: RolloutSettings, tokenizer: Tokenizer | None, *, include_messages: bool = True
    ) -> GroupFormat:
        """As the settings ask for it."""
        return cls(
            include_messages=include_messages,
            untrained=frozenset(EndedName(name) for name in env.untrained_outcomes),
            mixed_versions=env.train_mixed_versions,
            all_segments=env.all_segments,
            tokenizer=tokenizer,
            trunk_masked=env.branch_rule is not None and env.branch_rule.trunk_masked,
        )

    @classmethod
    def recorded(cls, env: Mapping[str, Any]) -> GroupFormat:
        """As the settings in a run.json ask for it. Raises KeyError, TypeError, ValueError if they are invalid."""
        lines = env["trained_segments"]
        return cls(
            untrained=frozenset(map(EndedName, env["untrained_outcomes"])),
            mixed_versions=bool(env["train_mixed_versions"]),
            all_segments=None if lines is None else lines == "all_segments",
            trunk_masked=BranchRule.masks_trunks(env),
        )

    def groups(self, group: Group) -> list[dict[str, Any]]:
        """The group, and with `all_segments` one more for each side line that all its members have."""
        group = self.masked(group)
        sides = side_groups(group, self) if self.all_segments else []
        mains = [member.trajectory.segment for member in group.members_G]
        lines = [scored_data_group(one, self, mains) for one in (group, *sides)]
        for overrides in zip(*(line["overrides"] for line in lines), strict=True):
            settle(overrides)
        return lines

    def masked(self, group: Group) -> Group:
        """The group with trunks as they are trained."""
        shared = in_trees(group.members_G) if self.trunk_masked else {}
        if not shared:
            return group
        members = []
        for member in group.members_G:
            attempt, line = member.attempt, member.trajectory
            record = own_from(attempt.record, shared[attempt.plan.rollout_id].last_fork)
            own = trajectory(record, self.tokenizer, attempt.plan.agent.closing_tag, line.segment)
            members.append(replace(member, trajectory=replace(line, trained_T=own.trained_T)))
        return replace(group, members_G=tuple(members))

    def trains_sides(self, kind: AgentKind) -> bool:
        """Whether side lines of this agent's rollouts are trained on, where a rollout may have several lines."""
        return kind == "program" if self.all_segments is None else self.all_segments

    def trains(self, outcome: Outcome, record: Record) -> bool:
        """Whether a rollout with this outcome is trained on; otherwise all of it is masked."""
        unwanted = isinstance(outcome, Ended) and outcome.name in self.untrained
        return not unwanted and (self.mixed_versions or len(record.policy_versions) < 2)


def side_groups(group: Group, form: GroupFormat) -> list[Group]:
    """The members' first side lines as a group, then their second ones, and so on while every member has one.

    A side line that the chat template refuses, or that does not add up, is left out.
    """
    sides = []
    shared = in_trees(group.members_G) if form.trunk_masked else {}
    for member in group.members_G:
        attempt, lines = member.attempt, []
        tag, main = attempt.plan.agent.closing_tag, member.trajectory.segment
        place = shared.get(attempt.plan.rollout_id)
        record = attempt.record if place is None else own_from(attempt.record, place.last_fork)
        for _, line in side_lines(record, form.tokenizer, tag, main):
            if isinstance(line, RecordError):
                log.warning("rollout %s: no side line: %s", attempt.plan.rollout_id, line)
            else:
                lines.append(replace(member, trajectory=line))
        sides.append(lines)
    return [replace(group, members_G=members) for members in zip(*sides, strict=False)]


def untrained_tokens(group: Group, *, all_segments: bool) -> int:
    """How many of its rollouts' sampled tokens are in no line of a groups file. `all_segments`: it has side
    lines."""
    tokens = [sampled_tokens(member.attempt.record.turns) for member in group.members_G]
    sides = [sorted(set(t) - {m.trajectory.segment}) for t, m in zip(tokens, group.members_G, strict=True)]
    most = min(map(len, sides), default=0) if all_segments else 0
    written = sum(
        by_segment[segment]
        for member, by_segment, others in zip(group.members_G, tokens, sides, strict=True)
        for segment in (member.trajectory.segment, *others[:most])
    )
    return sampled_in(group) - written


def sampled_in(group: Group) -> int:
    """How many tokens its rollouts sampled."""
    turns = (turn for member in group.members_G for turn in member.attempt.record.own_turns)
    return sum(turn.completion.sampled_tokens for turn in turns)


def settle(overrides: Sequence[dict[str, Any]]) -> None:
    """Puts into the facts of one rollout's lines, all that a file has of it, what they are to each other: their
    weights, and the share of the rollout's sampled tokens that is in none of them."""
    if len(overrides) == 1:
        return
    parts = [1.0 - facts["untrained_share"] for facts in overrides]
    written = sum(parts)
    for facts, part in zip(overrides, parts, strict=True):
        facts["weight"] = part / written if written else 1.0 / len(parts)
        facts["untrained_share"] = max(0.0, 1.0 - written)


def scored_data_group(
    group: Group, form: GroupFormat | None = None, mains: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """The dict that Atropos' trainers, run-api and tools read. `mains`: each member's main segment."""
    form, members = form or GroupFormat(), group.members_G
    mains = mains or [None] * len(members)
    trees = in_trees(members)
    entries = [
        entry(member, form, main, trees.get(member.attempt.plan.rollout_id))
        for member, main in zip(members, mains, strict=True)
    ]
    return group_line(entries, members[0].attempt.plan.sampling)


def entry(
    member: Member, form: GroupFormat, main: int | None = None, place: InTree | None = None
) -> dict[str, Any]:
    """What one member adds to each column of its group's line, as the only line of its rollout. `main`: the
    rollout's main segment; None: the plan's rule decides. `place`: in the group's trees; None: it has none."""
    line, attempt = member.trajectory, member.attempt
    tag = attempt.plan.agent.closing_tag
    if not form.trains(attempt.outcome, attempt.record):
        line = replace(line, trained_T=(False,) * len(line.tokens_T))
    return {
        "tokens": list(line.tokens_T),
        "masks": _trained(line, line.tokens_T, MASKED),
        "scores": float(member.score.value),
        "inference_logprobs": None if line.logprobs_T is None else _trained(line, line.logprobs_T, MASKED_LOGPROB),
        "messages": _messages(line) if form.include_messages else None,
        "advantages": None if place is None else place.advantages(attempt.record, line, form.tokenizer, tag),
        "overrides": _overrides(member, main),
    }


def group_line(entries: Sequence[Mapping[str, Any]], sampling: Sampling) -> dict[str, Any]:
    """A group's line, made of its members' entries. A column that a member lacks is null."""
    columns = {name: [one[name] for one in entries] for name in entries[0]}
    complete = {name: None if None in column else column for name, column in columns.items()}
    return {
        **{name: complete[name] for name in ("tokens", "masks", "scores", "inference_logprobs", "messages")},
        "advantages": complete["advantages"],
        "ref_logprobs": None,
        "generation_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "n": 1,
        },
        "overrides": complete["overrides"],
        "group_overrides": {"group_size": len(entries)},
    }


def _trained(line: Trajectory, values_T: tuple[T, ...], masked: T) -> list[T]:
    """The values at trained places, `masked` at the others."""
    trained, chosen = bytes(line.trained_T), [masked] * len(values_T)
    start = trained.find(1)
    while start >= 0:
        end = trained.find(0, start)
        end = len(values_T) if end < 0 else end
        chosen[start:end] = values_T[start:end]
        start = trained.find(1, end)
    return chosen


def _messages(line: Trajectory) -> list[dict[str, str]]:
    return [m.entry for m in line.messages]


def _overrides(member: Member, main: int | None) -> dict[str, Any]:
    """Facts of one rollout. docs/output.md fixes the names."""
    attempt, record, segment = member.attempt, member.attempt.record, member.trajectory.segment
    lines = in_lines(record.turns)
    if main is None and lines:
        main = main_segment(record.turns, attempt.plan.task.question, attempt.plan.agent.main_line)
    return {
        "rollout_id": attempt.plan.rollout_id,
        "parent": record.fork.parent if record.fork else None,
        "turn": record.fork.turn if record.fork else None,
        "task_id": attempt.plan.task.task_id,
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
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.sampled_tokens,
        "policy_version": record.policy_version,
        "mixed_policy_versions": len(record.policy_versions) > 1,
        "policy_spans": _spans(member),
        "staleness": member.staleness,
        "segment": segment,
        "main_segment": main or 0,
        "segments": len({turn.segment for turn, _ in lines if not turn.inherited}),
        "weight": 1.0,
        "untrained_share": untrained_share(record.turns, segment),
        "untrained_completions": sum(not turn.inherited for turn in record.turns)
        - sum(turn.segment == segment and not turn.inherited for turn, _ in lines),
        "abandoned_completions": sum(turn.abandoned for turn in record.own_turns),
        "unused_fields": list(record.requests.unused_fields),
        "refused_requests": list(record.requests.refusals),
        "other_segments": other_segments(lines, segment),
        "node": record.node or None,
    }


def _spans(member: Member) -> list[dict[str, Any]]:
    """Which versions sampled the line's sampled tokens, in order. Nothing is known: empty."""
    spans = sampled_by(member.attempt.record, member.trajectory)
    if all(span.oldest is None and span.newest is None for span in spans):
        return []
    return [asdict(span) for span in spans]


def other_segments(lines: Sequence[TurnTalk], segment: int) -> list[dict[str, Any]]:
    """Summaries of the other segments: plans, managed agents, and whatever a program or its code asked."""
    summaries: dict[int, dict[str, Any]] = {}
    for turn, talk in lines:
        if turn.segment == segment or turn.inherited:
            continue
        other = summaries.setdefault(
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
    return list(summaries.values())[:MAX_OTHER_SEGMENTS]


class GroupsFile:
    """The file that training reads. Groups are appended to it."""

    def __init__(self, path: Path, *, form: GroupFormat | None = None, fsync: bool = False) -> None:
        self.path = path
        self._form = form or GroupFormat()
        self._lines = JsonLines(path, fsync=fsync)

    async def append(self, group: Group) -> None:
        """Appends a group: one line, more with `all_segments`. All are on disk when this returns."""
        # A group of many long rollouts is trained from its ids, and can do without their texts.
        await self._lines.append(lambda: self._form.groups(group), lambda line: {**line, "messages": None})

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


def _twin(path: Path) -> Path:
    """The same file in the other kind, compressed or plain."""
    return path.with_suffix("") if is_compressed(path) else path.with_name(path.name + SUFFIX)


def fresh_path(path: Path) -> Path:
    """A new empty file: `path`, or with `_1`, `_2` … before its ending if that exists, as Atropos names files.

    It is made here, with its folder, so that no other process takes the name. Raises ConfigError.
    """
    number, fresh = 0, path
    ending = "".join(path.suffixes[-2:]) if is_compressed(path) else path.suffix
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                if _twin(fresh).exists():  # their reports would have one name
                    raise FileExistsError
                fresh.touch(exist_ok=False)
                return fresh
            except FileExistsError:
                number += 1
                fresh = path.with_name(f"{path.name.removesuffix(ending)}_{number}{ending}")
    except OSError as error:
        raise ConfigError(f"cannot make {fresh}: {error.strerror}") from error
