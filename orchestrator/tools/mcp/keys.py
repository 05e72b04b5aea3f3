"""Looks up what `env.mcp_servers` names as `env:NAME` or `file:PATH`, so that keys stand in no configuration."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.named_keys import ENV, FILE, read_key
from orchestrator.rules.redact import Secret
from orchestrator.tools.mcp.base import McpServer, Value


def with_keys(server: McpServer) -> McpServer:
    """The server with the values in place of their names. Blocking. Raises ConfigError."""
    return replace(
        server, env=_looked_up(server.env, server.name), headers=_looked_up(server.headers, server.name)
    )


def keys_of(server: McpServer) -> tuple[Secret, ...]:
    """The values that were looked up; of a header like `Bearer KEY` also what follows its first word."""
    found = [one for one in (*server.env.values(), *server.headers.values()) if isinstance(one, Secret)]
    parts = (text_of(one).partition(" ")[2].strip() for one in server.headers.values() if one in found)
    return (*found, *map(Secret, filter(None, parts)))


def text_of(value: Value) -> str:
    """The value itself."""
    return value.reveal() if isinstance(value, Secret) else value


def _looked_up(values: Mapping[str, Value], server: str) -> dict[str, Value]:
    return {name: _value(value, f"env.mcp_servers: {server}: {name}") for name, value in values.items()}


def _value(value: Value, where: str) -> Value:
    if isinstance(value, Secret) or not value.startswith((ENV, FILE)):
        return value
    return read_key(value, where)
