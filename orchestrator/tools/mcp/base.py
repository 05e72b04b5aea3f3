"""What an operator says of an MCP server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.rules.redact import Secret

Value = str | Secret  # as it is written, `env:NAME` or `file:PATH`; a Secret once that was looked up


@dataclass(frozen=True, slots=True)
class McpServer:
    """A command to run, or an address to ask. `env`, `headers`: by name. `recorded`: what its tools were in a run
    that is played again, by name; it is not started then. None: it is."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, Value] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, Value] = field(default_factory=dict)
    recorded: Mapping[str, Mapping[str, Any]] | None = None

    def as_setting(self) -> dict[str, Any]:
        """The settings as an operator writes them."""
        parts: dict[str, Any] = {"command": self.command, "args": list(self.args), "env": dict(self.env)}
        if self.url:
            parts = {"url": self.url, "headers": dict(self.headers)}
        return {"name": self.name, **{name: part for name, part in parts.items() if part}}


@dataclass(frozen=True, slots=True)
class McpToolFacts:
    """A tool as agents are told of it. `server`: the name of the one that it is of."""

    server: str
    description: str
    inputs: Mapping[str, Mapping[str, Any]]
    output_type: str = "string"
