"""What a host tool offers (it runs in the orchestrator, where its key stays), and names that are taken."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

FILE_TOOLS = ("read_file", "write_file", "append_to_file")  # the sandbox's own, in the code worker
CALLER: ContextVar[str] = ContextVar("caller", default="")  # the id of the rollout whose call it is
RESERVED = frozenset({*FILE_TOOLS, "final_answer", "python_interpreter"})


class ToolFacts(Protocol):
    """What an agent is told of a tool."""

    @property
    def description(self) -> str:
        """What it does, for the agent's prompt."""

    @property
    def inputs(self) -> Mapping[str, Mapping[str, Any]]:
        """Argument name to {"type", "description", "nullable"}, as smolagents writes it."""

    @property
    def output_type(self) -> str:
        """smolagents' name of the result's type."""


class HostTool(ToolFacts, Protocol):
    """One tool served to the sandboxes through CallTool."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Runs it. Raises ToolError, whose text the agent sees."""
