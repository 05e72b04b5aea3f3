"""Settings of the agent, and the kinds of values that only it has."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from orchestrator.rules.text import is_name, path_of
from orchestrator.settings.json_kinds import Json, Texts, json_value
from orchestrator.settings.kinds import OBJECT, File, Flag, Integer, Text, forms
from orchestrator.settings.mcp import McpServers
from orchestrator.settings.row import PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.tools.mcp.base import McpServer
from orchestrator.types import AgentKind, AgentSpec, ManagedAgent, SandboxSpec

_AGENT = re.compile(r"code|tool_calling|shell|program:\S.*")
_MODULE = re.compile(r"\*|[A-Za-z_]\w*(?:\.\w+)*(?:\.\*)?")
_IMPORTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_OBJECTS = Texts(Text("of the form python:MODULE:TOOL", "TOOL", re.compile(rf"python:{OBJECT}").fullmatch))
MARKDOWN = ("```python", "```")
MAX_AGENTS = 16
_IN_PATTERNS = frozenset(r".^$*+?{}[]\|()")  # smolagents uses tags as regular expressions
_MAX_TAG_CHARS = 40
_MAX_DESCRIPTION_CHARS = 4_000
SMOLAGENTS: tuple[AgentKind, ...] = ("code", "tool_calling")
_OURS: tuple[AgentKind, ...] = (*SMOLAGENTS, "shell")


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
        return json.dumps([agent.as_setting() for agent in value])


def _managed(raw: object) -> ManagedAgent:
    if not isinstance(raw, Mapping) or not set(raw) <= {"name", "description", "tools", "max_steps", "agent"}:
        raise ValueError
    name, description, kind = raw.get("name"), raw.get("description"), raw.get("agent")
    if not isinstance(name, str) or not is_name(name):
        raise ValueError
    if not isinstance(description, str) or not 0 < len(description.strip()) <= _MAX_DESCRIPTION_CHARS:
        raise ValueError
    if kind is not None and kind not in SMOLAGENTS:
        raise ValueError
    steps = raw.get("max_steps")
    return ManagedAgent(
        name,
        description.strip(),
        _names(raw.get("tools")),
        None if steps is None else Integer(1, 10_000).read(steps),
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


def _is_agent(text: str) -> bool:
    return bool(_AGENT.fullmatch(text) and path_of(text.removeprefix("program:")))


@dataclass(frozen=True, kw_only=True, repr=False)
class AgentSettings(Settings, group="Agent", resume=Resume.DATA, commands=RUNS, from_run=("branch",)):
    """What solves the tasks, and what it is equipped with."""

    agent: str = row(
        "code",
        forms("AGENT", _is_agent, "code", "tool_calling", "shell", "program:PATH"),
        "what solves the task: smolagents' CodeAgent or ToolCallingAgent, a shell's commands, or a program that "
        "calls OpenAI's or Anthropic's API",
        resume=Resume.CODE,
        commands=(*RUNS, *PLAYS),
        from_run=("demo", *PLAYS),
    )
    program_preload: tuple[str, ...] = row(
        (),
        Texts(Text("a module", "MODULE", _IMPORTED.fullmatch)),
        "modules that sandboxes import for the program ahead of their tasks",
        resume=Resume.FREE,
        to=(SandboxSpec, "preload"),
        only_for=("program",),
    )
    planning_interval: int | None = row(
        None,
        Integer(1, 10_000),
        "steps between two plans",
        to=(AgentSpec, "planning_interval"),
        only_for=SMOLAGENTS,
    )
    final_answer_at_max_steps: bool = row(
        False,
        Flag(),
        "one more completion for an answer when the steps are used up",
        to=(AgentSpec, "final_answer_at_max_steps"),
        only_for=_OURS,
    )
    instructions: str | None = row(
        None, Text(), "added to the agent's system prompt", to=(AgentSpec, "instructions"), only_for=_OURS
    )
    prompt_templates: Path | None = row(
        None,
        File(),
        "a YAML file of smolagents' prompt templates, all or some",
        resume=Resume.CONFIRM,
        unset="smolagents' own",
        commands=(*RUNS, *PLAYS),
        from_run=PLAYS,
        only_for=SMOLAGENTS,
    )
    authorized_imports: tuple[str, ...] = row(
        ("*",),
        Texts(Text("a module, or * for any", "MODULE", _MODULE.fullmatch)),
        "modules that the prompt names as importable; the sandbox itself forbids none",
        to=(AgentSpec, "authorized_imports"),
        only_for=SMOLAGENTS,
    )
    code_block_tags: tuple[str, str] = row(
        ("<code>", "</code>"),
        Tags(),
        "what a code agent writes its code between",
        to=(AgentSpec, "code_tags"),
        only_for=SMOLAGENTS,
    )
    managed_agents: tuple[ManagedAgent, ...] = row(
        (),
        ManagedAgents(),
        "agents that the main one can call, each with steps of its own",
        to=(AgentSpec, "managed_agents"),
        only_for=SMOLAGENTS,
    )
    sandbox_tools: tuple[str, ...] = row(
        (),
        _OBJECTS,
        "functions of yours that run in the sandbox; their modules are sent there",
        resume=Resume.CONFIRM,
        commands=(*RUNS, *PLAYS),
        from_run=PLAYS,
        only_for=SMOLAGENTS,
    )
    host_tools: tuple[str, ...] = row(
        (),
        _OBJECTS,
        "functions or tools of yours that run here, under the limits of the web tools",
        resume=Resume.CONFIRM,
        commands=(*RUNS, *PLAYS),
        from_run=PLAYS,
        only_for=(*SMOLAGENTS, "program"),
    )

    mcp_servers: tuple[McpServer, ...] = row(
        (),
        McpServers(),
        "MCP servers of yours, run or reached here: their tools are host tools, under the limits of the web tools",
        resume=Resume.CONFIRM,
        commands=(*RUNS, "doctor", "branch"),
        only_for=(*SMOLAGENTS, "program"),
    )

    @property
    def agent_kind(self) -> AgentKind:
        """`env.agent` without the path of a program."""
        return cast("AgentKind", self.agent.partition(":")[0])

    @property
    def program(self) -> Path | None:
        """The path of the program, if the agent is one."""
        return path_of(self.agent.removeprefix("program:")) if self.agent_kind == "program" else None
