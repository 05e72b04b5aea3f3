"""Reads the operator's tools, prompts and program for the agent, and checks them before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.agents.equipment import Equipment
from orchestrator.agents.program import read_program
from orchestrator.agents.templates import read_templates
from orchestrator.errors import ConfigError
from orchestrator.tools.base import FILE_TOOLS, HostTool
from orchestrator.tools.brought import demand_tool_names, host_tool, sandbox_tool
from orchestrator.tools.functions import Workers

if TYPE_CHECKING:
    from orchestrator.settings.table import EnvSettings


def equip(env: EnvSettings) -> Equipment:
    """What goes into every sandbox. Blocking. Raises ConfigError."""
    templates = env.prompt_templates
    return Equipment(
        sandbox_tools=tuple(sandbox_tool(spec) for spec in env.sandbox_tools),
        prompt_templates=None if templates is None else read_templates(templates, env.agent_kind),
        program=() if env.program is None else read_program(env.program),
    )


def brought_host_tools(env: EnvSettings) -> dict[str, HostTool]:
    """The operator's host tools by name. Imports their modules. Raises ConfigError."""
    if not env.host_tools:
        return {}
    workers = Workers(env.tool_timeout, env.max_concurrent_tool_calls)
    tools = [host_tool(spec, workers) for spec in env.host_tools]
    demand_tool_names(name for name, _ in tools)
    return dict(tools)


def check_team(env: EnvSettings, equipment: Equipment, tools: Mapping[str, HostTool]) -> None:
    """Raises ConfigError unless all names differ and managed agents name existing tools."""
    brought = [tool.name for tool in equipment.sandbox_tools]
    demand_tool_names(brought, tools, (agent.name for agent in env.managed_agents))
    names = (*FILE_TOOLS, *brought, *tools)
    for agent in env.managed_agents:
        if unknown := sorted(set(agent.tools or ()) - set(names)):
            raise ConfigError(
                f"env.managed_agents: {agent.name} is given {', '.join(unknown)}; there are {', '.join(names)}"
            )
