"""The tools of MCP servers as a run's description has them: what is played again needs no server."""

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.text import is_name
from orchestrator.tools.base import ToolFacts
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.schemas import MAX_TOOLS


def tool_facts(tools: Mapping[str, ToolFacts]) -> dict[str, dict[str, Any]]:
    """For run.json: those of the tools that are of MCP servers, as agents were told of them."""
    return {
        name: {
            "server": server,
            "description": tool.description,
            "inputs": {argument: dict(shape) for argument, shape in tool.inputs.items()},
            "output_type": tool.output_type,
        }
        for name, tool in tools.items()
        if (server := getattr(tool, "server", ""))
    }


def recorded_servers(agent: object) -> tuple[McpServer, ...]:
    """Stand-ins for the servers of a recorded run. `agent`: of its run.json. Raises ConfigError."""
    raw = agent.get("mcp_tools") if isinstance(agent, Mapping) else None
    if raw is None:
        return ()
    if not isinstance(raw, Mapping) or len(raw) > MAX_TOOLS or not all(map(_is_tool, raw, raw.values())):
        raise ConfigError("run.json: agent.mcp_tools does not describe tools: it was edited, or is damaged")
    return (McpServer("recorded", recorded=dict(raw)),) if raw else ()


def _is_tool(name: object, facts: object) -> bool:
    if not is_name(name) or not isinstance(facts, Mapping):
        return False
    texts = (facts.get("server"), facts.get("description"), facts.get("output_type"))
    inputs = facts.get("inputs")
    return all(isinstance(text, str) and text for text in texts) and (
        isinstance(inputs, Mapping)
        and all(
            is_name(argument)
            and isinstance(shape, Mapping)
            and isinstance(shape.get("type"), str)
            and isinstance(shape.get("description"), str)
            for argument, shape in inputs.items()
        )
    )
