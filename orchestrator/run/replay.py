"""Replays of a recorded run: its plans, read from the record, and what differs between then and now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from orchestrator.calls.declared import declared
from orchestrator.errors import ConfigError
from orchestrator.rules.likeness import first_difference, shortened
from orchestrator.run.lenient import json_lines
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import dumps, text_at
from orchestrator.types import (
    Attempt,
    Member,
    RolloutPlan,
    SandboxSpec,
    Task,
    ToolCall,
    Turn,
    conversations,
)
from orchestrator.types.prefix import once_more

CallPlace = tuple[int, int]  # the offset of a rollout's line, and the number of one of its calls
_DIGEST_BYTES = 16
_WEB_TOOLS = ("web_search", "visit_page")  # a program need not tell the model of them under these names


@dataclass(frozen=True, slots=True)
class Replayable:
    """The rollouts of a run that can be played again: the scored ones. `places`: offsets of their lines, by id.

    `calls`: all their recorded calls of host tools: what they asked, and where `call` finds the answer.
    `crossings`: whether they asked anything of the outside.
    """

    path: Path
    places: Mapping[str, int]
    tasks: frozenset[str]
    web_tools: bool
    calls: tuple[tuple[bytes, CallPlace], ...]
    crossings: bool = False

    @classmethod
    def read(cls, rollouts: Path, only: str | None = None) -> Replayable:
        """All of them, or the one with the id `only`. Raises ConfigError if there is none or one is unreadable."""
        places: dict[str, int] = {}
        tasks: set[str] = set()
        calls: list[tuple[bytes, CallPlace]] = []
        web, others, asked = False, 0, False
        for offset, line in json_lines(rollouts):
            rollout_id = line.get("rollout_id") if line is not None else None
            if line is None or line.get("score") is None or only not in (None, rollout_id):
                others += 1
                continue
            attempt = _read_at(rollouts, offset, str(rollout_id))
            places[attempt.rollout_id] = offset
            tasks.add(attempt.task_id)
            asked = asked or bool(attempt.record.crossings)
            made = attempt.record.tool_calls
            web = web or _knows_web_tools(attempt) or any(call.name in _WEB_TOOLS for call in made)
            calls += [(digest(call.name, call.arguments), (offset, n)) for n, call in enumerate(made)]
        if not places:
            what = f"no scored rollout {only}" if only is not None else "no scored rollout"
            raise ConfigError(f"{rollouts} holds {what} ({others} other lines): nothing to replay")
        return cls(rollouts, places, frozenset(tasks), web, tuple(calls), asked)

    def call(self, place: CallPlace) -> ToolCall:
        """The call at a place. Blocks. Raises OSError, ValueError."""
        offset, number = place
        made = read_attempt(text_at(self.path, offset)).record.tool_calls
        if number >= len(made):
            raise ValueError(f"{self.path} is not the file that it was")
        return made[number]

    def attempts(self) -> Iterator[RecordedAttempt]:
        """The attempts, each read only when it is needed. Raises ConfigError."""
        return (_read_at(self.path, offset, rollout_id) for rollout_id, offset in self.places.items())


def _read_at(path: Path, offset: int, rollout_id: str) -> RecordedAttempt:
    try:
        attempt = read_attempt(text_at(path, offset))
        if attempt.rollout_id != rollout_id:
            raise ValueError("the file is not what it was")
        return attempt
    except ValueError as error:
        raise ConfigError(f"rollout {rollout_id} cannot be read back: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def digest(name: str, arguments: Mapping[str, Any]) -> bytes:
    """Of a call of a host tool: the same for equal calls."""
    call = [name, dict(arguments)]
    try:
        text = dumps(call)
    except TypeError:  # a number of more than 64 bits
        text = json.dumps(call).encode()
    return blake2b(text, digest_size=_DIGEST_BYTES).digest()


def plan_of(attempt: RecordedAttempt, task: Task, sandbox: SandboxSpec) -> RolloutPlan:
    """The recorded plan, with this sandbox. A branch is brought to its turn first."""
    return RolloutPlan(
        rollout_id=attempt.rollout_id,
        task=task,
        group=attempt.group,
        index=attempt.index,
        attempt=attempt.attempt,
        sampling=attempt.sampling,
        agent=attempt.agent,
        sandbox=sandbox,
        limits=attempt.limits,
        group_size=attempt.group_size,
        prefix=once_more(attempt.record),
    )


def attempt_of(result: Member | Attempt) -> Attempt:
    return result.attempt if isinstance(result, Member) else result


def differences(then: RecordedAttempt, result: Member | Attempt) -> list[str]:
    """The differences, the outcome first. Times are not compared."""
    member = result if isinstance(result, Member) else None
    now = attempt_of(result)
    old_score, new_score = then.score, member.score if member else None
    then_parts, parts = old_score.parts if old_score else {}, new_score.parts if new_score else {}
    pairs: list[tuple[str, object, object]] = [
        ("outcome", str(then.outcome.name), str(now.outcome.name)),
        ("answer", then.record.answer, now.record.answer),
        ("score", old_score.value if old_score else None, new_score.value if new_score else None),
        *((name, then_parts.get(name), parts.get(name)) for name in sorted({*then_parts, *parts})),
    ]
    changes = [f"{name} {shortened(old)} then, {shortened(new)} now" for name, old, new in pairs if old != new]
    return changes + _prompts(then.record.turns, now.record.turns)


def _prompts(then: Sequence[Turn], now: Sequence[Turn]) -> list[str]:
    """The first prompt that differs; later ones follow from it."""
    changes = [f"{len(then)} completions then, {len(now)} now"] if len(then) != len(now) else []
    for number, (old, new) in enumerate(zip(conversations(then), conversations(now), strict=False), 1):
        if old != new:
            return [*changes, f"prompt {number}: {first_difference(old, new)}"]
    for number, (before, after) in enumerate(zip(then, now, strict=False), 1):
        ids, others = before.prompt_ids, after.prompt_ids
        if ids is not None and others is not None and tuple(ids) != tuple(others):
            return [*changes, f"prompt {number}: the same text, but other ids: another tokenizer?"]
    return changes


def _knows_web_tools(attempt: RecordedAttempt) -> bool:
    """Whether the agent's first prompt names web tools; without them it would be another prompt."""
    first = next(iter(attempt.record.turns), None)
    if first is None:
        return False
    shown = ("def web_search(", "- web_search: ")  # to a code agent, to one that calls tools as JSON
    named = "web_search" in declared(first.tools).parameters
    return named or any(text in message.content for message in first.messages[:1] for text in shown)
