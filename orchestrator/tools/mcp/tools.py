"""Opens the servers of a run, and makes host tools of what they list."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

from orchestrator.errors import ConfigError, EnvironmentUnusable, ToolError
from orchestrator.rules.text import one_line
from orchestrator.tools.base import HostTool
from orchestrator.tools.functions import check_arguments
from orchestrator.tools.mcp.base import McpServer, McpToolFacts
from orchestrator.tools.mcp.keys import with_keys
from orchestrator.tools.mcp.schemas import MAX_TOOLS, Listed, Untellable, defused, listed, tool_names

_FLAG = "env.mcp_servers"


class McpTool:
    """One tool of a server, as a `HostTool`."""

    output_type = "string"

    def __init__(self, server: Any, tool: Listed) -> None:
        self.server = server.name
        self.description, self.inputs = server.untold(tool.description), server.untold(tool.inputs)
        self._server, self._tool = server, tool

    def defuse(self, spells: Callable[[str], bool]) -> None:
        """Takes out of its texts what spells a control token."""
        self.description, self.inputs = defused(self.description, spells), defused(self.inputs, spells)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError, ToolServiceError."""
        check_arguments(arguments, self.inputs)
        text: str = await self._server.call(self._tool, arguments)
        return text


class NotStarted(McpToolFacts):
    """A tool of a run that is played again: its server is not started."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError."""
        raise ToolError("this call is not in the recording")


def defuse(tools: Mapping[str, HostTool], spells: Callable[[str], bool]) -> None:
    """Takes out of the texts of servers what spells a control token of the model, as soon as that is known."""
    for tool in tools.values():
        if isinstance(tool, McpTool):
            tool.defuse(spells)


async def open_servers(
    servers: Sequence[McpServer],
    taken: Collection[str],
    stack: AsyncExitStack,
    notes: list[str],
    *,
    timeout_s: float,
    max_calls: int,
    fail_rollouts: bool,
) -> dict[str, HostTool]:
    """The tools of all servers, by the names that agents have for them; none of those is in `taken`. `stack` ends
    the servers. Raises ConfigError, EnvironmentUnusable."""
    tools: dict[str, HostTool] = {}
    live = []
    for server in servers:
        if server.recorded is None:
            live.append(await asyncio.to_thread(with_keys, server))
        for name, facts in (server.recorded or {}).items():
            tools[name] = NotStarted(facts["server"], facts["description"], facts["inputs"], facts["output_type"])
    if not live:
        return tools
    try:
        # In a thread: the SDK takes a second to import.
        Server = (await asyncio.to_thread(import_module, "orchestrator.tools.mcp.server")).Server
    except ImportError as error:
        raise ConfigError(f"{_FLAG}: {error}; install it: pip install 'rollout-orchestrator[mcp]'") from None
    opened = {
        one.name: Server(one, timeout_s=timeout_s, max_calls=max_calls, fail_rollouts=fail_rollouts)
        for one in live
    }
    for one in opened.values():
        stack.push_async_callback(one.aclose)
    lists = await asyncio.gather(*(one.tools() for one in opened.values()), return_exceptions=True)
    readable: dict[str, dict[str, Listed]] = {}
    for name, found in zip(opened, lists, strict=True):
        if isinstance(found, EnvironmentUnusable):
            raise EnvironmentUnusable(f"{_FLAG}: {name}: {one_line(str(found))}") from found
        if isinstance(found, BaseException):
            raise found
        readable[name] = _readable(name, found, notes)
    names = tool_names(readable, taken)
    for (server_name, own), name in names.items():
        if name in tools or name in taken:
            raise ConfigError(f"{_FLAG}: two tools would be called {name}; give the servers other names")
        tools[name] = McpTool(opened[server_name], readable[server_name][own])
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"{_FLAG}: the servers have {len(tools)} tools together; at most {MAX_TOOLS} are taken")
    return tools


def _readable(server: str, tools: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Listed]:
    readable: dict[str, Listed] = {}
    for tool in tools[: MAX_TOOLS + 1]:
        try:
            one = listed(tool)
        except Untellable as error:
            notes.append(
                f"the tool {one_line(str(tool.get('name')))} of the MCP server {server} is left out: {error}"
            )
        else:
            readable[one.name] = one
    return readable
