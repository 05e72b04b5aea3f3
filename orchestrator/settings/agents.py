"""Kinds of settings for the agent: code tags, managed agents. See `orchestrator.settings.kinds`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.rules.text import is_name
from orchestrator.settings.kinds import Json, Whole, json_value
from orchestrator.types import AgentKind, ManagedAgent

MARKDOWN = ("```python", "```")
MAX_AGENTS = 16
_IN_PATTERNS = frozenset(r".^$*+?{}[]\|()")  # smolagents uses tags as regular expressions
_MAX_TAG_CHARS = 40
_MAX_DESCRIPTION_CHARS = 4_000
_KINDS: tuple[AgentKind, ...] = ("code", "tool_calling")


@dataclass(frozen=True, slots=True)
class Tags(Json):
    """The opening and closing tag of code blocks."""

    valid: str = (
        'markdown, or a JSON list of two different tags like ["<code>", "</code>"], without spaces at their ends '
        r"and without any of .^$*+?{}[]\|()"
    )

    def read(self, raw: object) -> tuple[str, str]:
        raw = MARKDOWN if isinstance(raw, str) and raw.strip() == "markdown" else json_value(raw)
        if not isinstance(raw, list | tuple) or len(raw) != 2 or not all(map(_is_tag, raw)) or raw[0] == raw[1]:
            raise ValueError
        return raw[0], raw[1]


@dataclass(frozen=True, slots=True)
class ManagedAgents(Json):
    """Agents the main one can call: a list of mappings."""

    valid: str = (
        f"a list of at most {MAX_AGENTS} objects, each with a name (a Python identifier, each its own), a "
        "description, and optionally tools (a list of names), max_steps and agent (code or tool_calling)"
    )

    def read(self, raw: object) -> tuple[ManagedAgent, ...]:
        raw = json_value(raw)
        if not isinstance(raw, list | tuple) or len(raw) > MAX_AGENTS:
            raise ValueError
        agents = tuple(one if isinstance(one, ManagedAgent) else _managed(one) for one in raw)
        if len({agent.name for agent in agents}) != len(agents):
            raise ValueError
        return agents

    def show(self, value: tuple[ManagedAgent, ...]) -> str:
        return json.dumps([agent.given() for agent in value])


def _managed(raw: object) -> ManagedAgent:
    known = ("name", "description", "tools", "max_steps", "agent")
    if not isinstance(raw, Mapping) or not set(raw) <= set(known):
        raise ValueError
    name, description, kind = raw.get("name"), raw.get("description"), raw.get("agent")
    if not isinstance(name, str) or not is_name(name):
        raise ValueError
    if not isinstance(description, str) or not 0 < len(description.strip()) <= _MAX_DESCRIPTION_CHARS:
        raise ValueError
    if kind is not None and kind not in _KINDS:
        raise ValueError
    steps = raw.get("max_steps")
    return ManagedAgent(
        name,
        description.strip(),
        _names(raw.get("tools")),
        None if steps is None else Whole(1, 10_000).read(steps),
        kind,
    )


def _names(raw: Any) -> tuple[str, ...] | None:
    if raw is None:
        return None
    if not isinstance(raw, list | tuple) or not all(map(is_name, raw)):
        raise ValueError
    return tuple(dict.fromkeys(raw))


def _is_tag(text: object) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= _MAX_TAG_CHARS or text != text.strip():
        return False
    return text.isprintable() and not _IN_PATTERNS & set(text)
