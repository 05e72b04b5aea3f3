"""A recorded run to be played again: its plans read back, and what differs between then and now. Pure but for
reading the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.report.values import json_lines, objects, read_at
from orchestrator.run.directory import SCHEMA, rollout_line
from orchestrator.run.typed import typed
from orchestrator.types import (
    AgentSpec,
    Attempt,
    Limits,
    ManagedAgent,
    Member,
    RolloutPlan,
    Sampling,
    SandboxSpec,
    Task,
)

Line = Mapping[str, Any]
AROUND_CHARS = 40  # shown on each side of a difference
_MOST_ON_WIRE = (1 << 31) - 1  # what a sandbox and an inference server are told


@dataclass(frozen=True, slots=True)
class Recorded:
    """Which rollouts of a run can be played again: scored ones. `places`: where their lines begin, by id.

    `calls`: all calls of host tools, as they stand there.
    """

    path: Path
    places: Mapping[str, int]
    tasks: frozenset[str]
    web_tools: bool
    calls: tuple[Line, ...]

    @classmethod
    def read(cls, rollouts: Path, only: str | None = None) -> Recorded:
        """All of them, or the one of that id. Raises ConfigError where there is none."""
        places: dict[str, int] = {}
        tasks: set[str] = set()
        calls: list[Line] = []
        web, others = False, 0
        for offset, line in json_lines(rollouts):
            if line is None or not isinstance(rollout_id := line.get("rollout_id"), str):
                continue
            if line.get("schema") != SCHEMA or line.get("score") is None or only not in (None, rollout_id):
                others += 1
                continue
            places[rollout_id] = offset
            tasks.add(str(line.get("task_id")))
            web = web or _knows_web_tools(line)
            calls += objects(line.get("tool_calls"))
        if not places:
            what = f"no scored rollout {only}" if only is not None else "no scored rollout"
            raise ConfigError(f"{rollouts} holds {what} ({others} other lines): nothing to replay")
        return cls(rollouts, places, frozenset(tasks), web, tuple(calls))

    def lines(self) -> Iterator[Line]:
        """One after the other, read when it is their turn."""
        return (read_at(self.path, offset) for offset in self.places.values())


def plan_of(line: Line, task: Task, sandbox: SandboxSpec) -> RolloutPlan:
    """The plan as it was, in a sandbox of today's kind. Raises ConfigError for a line of another make."""
    try:
        told = line["plan"]
        if not isinstance(line.get("score_parts") or {}, dict):
            raise TypeError("score_parts must be an object")
        return RolloutPlan(
            rollout_id=str(line["rollout_id"]),
            task=task,
            group=int(line["group"]),
            index=int(line["index"]),
            attempt=int(line["attempt"]),
            sampling=typed(Sampling(**told["sampling"]), most=_MOST_ON_WIRE),
            agent=agent_of(told["agent"]),
            sandbox=replace(sandbox, image=task.image) if task.image else sandbox,
            limits=typed(Limits(**told["limits"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"rollout {line.get('rollout_id')} cannot be read back: {error}") from error


def agent_of(told: Line) -> AgentSpec:
    """Raises KeyError, TypeError, ValueError, AttributeError for what is no agent's plan."""
    agent: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
    agent["managed_agents"] = tuple(map(_managed, agent.get("managed_agents", ())))
    return typed(AgentSpec(**agent), most=_MOST_ON_WIRE)


def _managed(told: Line) -> ManagedAgent:
    tools = told["tools"]
    agent = ManagedAgent(**{**told, "tools": None if tools is None else tuple(tools)})
    return typed(agent, most=_MOST_ON_WIRE)


def differences(recorded: Line, result: Member | Attempt) -> list[str]:
    """What came out otherwise, the outcome first. Times are not compared."""
    now = rollout_line(result)
    found = [
        f"{name} {_short(recorded.get(name))} then, {_short(now[name])} now"
        for name in ("outcome", "answer", "score")
        if recorded.get(name) != now[name]
    ]
    then_parts, parts = recorded.get("score_parts") or {}, now["score_parts"] or {}
    found += [
        f"{name} {_short(then_parts.get(name))} then, {_short(parts.get(name))} now"
        for name in sorted({*then_parts, *parts})
        if then_parts.get(name) != parts.get(name)
    ]
    try:
        return found + _prompts(recorded["completions"], now["completions"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"rollout {recorded.get('rollout_id')} cannot be read back: {error}") from error


def _prompts(then: list[Line], now: list[Line]) -> list[str]:
    """The first prompt that was another one: what follows it was said to something else."""
    found = [f"{len(then)} completions then, {len(now)} now"] if len(then) != len(now) else []
    before, after = _conversations(then), _conversations(now)
    for number, (old, new) in enumerate(zip(before, after, strict=False), 1):
        if old != new:
            return [*found, f"prompt {number}: {_first_difference(old, new)}"]
    for number, (old_line, new_line) in enumerate(zip(then, now, strict=False), 1):
        ids, others = old_line["prompt_ids"], new_line["prompt_ids"]
        if ids is not None and others is not None and list(ids) != list(others):
            return [*found, f"prompt {number}: the same text, but other ids: another tokenizer?"]
    return found


def _conversations(completions: list[Line]) -> Iterator[list[tuple[str, str]]]:
    talk: list[tuple[str, str]] = []
    for completion in completions:
        talk = [*talk[: completion["kept"]], *((m["role"], m["content"]) for m in completion["messages"])]
        yield talk


def _first_difference(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> str:
    for number, ((old_role, old_text), (role, text)) in enumerate(zip(old, new, strict=False), 1):
        if (old_role, old_text) == (role, text):
            continue
        same = next((i for i, (a, b) in enumerate(zip(old_text, text, strict=False)) if a != b), None)
        at = min(len(old_text), len(text)) if same is None else same
        window = slice(max(0, at - AROUND_CHARS), at + AROUND_CHARS)
        return f"message {number} ({role}) has {_short(old_text[window])} then, {_short(text[window])} now"
    return f"{len(old)} messages then, {len(new)} now"


def _knows_web_tools(line: Line) -> bool:
    """Whether the agent was told of them: without them its prompt would be another one."""
    completions = line.get("completions")
    first = completions[0] if isinstance(completions, list) and completions else {}
    messages = first.get("messages") if isinstance(first, dict) else None
    return isinstance(messages, list) and any("def web_search(" in str(m) for m in messages[:1])


def _short(value: object) -> str:
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 3 * AROUND_CHARS else text[: 3 * AROUND_CHARS] + "..."
