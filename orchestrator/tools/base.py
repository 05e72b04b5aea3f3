"""What a host tool offers: it runs in the orchestrator, where its key stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HostTool(Protocol):
    """One tool served to the sandboxes through CallTool."""

    @property
    def description(self) -> str:
        """What it does, for the agent's prompt."""

    @property
    def inputs(self) -> Mapping[str, Mapping[str, Any]]:
        """Argument name to {"type", "description", "nullable"}, as smolagents writes it."""

    @property
    def output_type(self) -> str:
        """smolagents' name of the result's type."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Runs it. Raises ToolError, whose text the agent sees."""
