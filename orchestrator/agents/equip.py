"""Reads the operator's tools, prompts and program for the agent, and checks them before anything starts."""

from collections.abc import Mapping, Sequence

from orchestrator.agents.equipment import Equipment
from orchestrator.agents.program import read_program
from orchestrator.agents.templates import read_templates
from orchestrator.errors import ConfigError
from orchestrator.settings.agent import AgentSettings
from orchestrator.tools.base import FILE_TOOLS, HostTool
from orchestrator.tools.functions import Workers
from orchestrator.tools.operator_tools import demand_tool_names, host_tool, sandbox_tool
from orchestrator.types import ManagedAgent


def equip(settings: AgentSettings) -> Equipment:
    """What goes into every sandbox. Blocking. Raises ConfigError."""
    templates = settings.prompt_templates
    return Equipment(
        sandbox_tools=tuple(sandbox_tool(spec) for spec in settings.sandbox_tools),
        prompt_templates=None if templates is None else read_templates(templates, settings.agent_kind),
        program=() if settings.program is None else read_program(settings.program),
    )


def operator_host_tools(specs: Sequence[str], workers: Workers) -> dict[str, HostTool]:
    """The operator's host tools by name; `workers` calls them. Imports their modules. Raises ConfigError."""
    tools = [host_tool(spec, workers) for spec in specs]
    demand_tool_names(name for name, _ in tools)
    return dict(tools)


def check_team(team: Sequence[ManagedAgent], equipment: Equipment, tools: Mapping[str, HostTool]) -> None:
    """Raises ConfigError unless all names differ and managed agents name existing tools."""
    brought = [tool.name for tool in equipment.sandbox_tools]
    demand_tool_names(brought, tools, (agent.name for agent in team))
    names = (*FILE_TOOLS, *brought, *tools)
    for agent in team:
        if unknown := sorted(set(agent.tools or ()) - set(names)):
            raise ConfigError(
                f"env.managed_agents: {agent.name} is given {', '.join(unknown)}; there are {', '.join(names)}"
            )
