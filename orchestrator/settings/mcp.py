"""The kind of `env.mcp_servers`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from orchestrator.rules.redact import names_a_key, redact
from orchestrator.rules.text import is_name
from orchestrator.settings.json_kinds import HEADER, Json, json_value
from orchestrator.settings.kinds import is_url
from orchestrator.tools.mcp.base import McpServer

MAX_SERVERS = 16
_MAX_ARGS, _MAX_CHARS = 64, 4_096
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:\S.*")


@dataclass(frozen=True, slots=True)
class McpServers(Json):
    """MCP servers: a list of mappings. A key may stand in none of them, so that run.json can have them all."""

    hidden: ClassVar[bool] = True
    valid: str = (
        f"a list of at most {MAX_SERVERS} objects, each with a name (a Python identifier, each its own) and "
        "either a command (with args, env) or a url (with headers); headers, and variables that are named like "
        "keys, as env:NAME or file:PATH; no key in args or url"
    )

    def read(self, raw: object) -> tuple[McpServer, ...]:
        raw = json_value(raw)
        if not isinstance(raw, list | tuple) or len(raw) > MAX_SERVERS:
            raise ValueError
        servers = tuple(one if isinstance(one, McpServer) else _server(one) for one in raw)
        if len({server.name for server in servers}) != len(servers):
            raise ValueError
        return servers

    def show(self, value: tuple[McpServer, ...]) -> str:
        return json.dumps([server.as_setting() for server in value])


def _server(raw: object) -> McpServer:
    if not isinstance(raw, Mapping) or not isinstance(name := raw.get("name"), str) or not is_name(name):
        raise ValueError
    if len(name) > 40 or ("command" in raw) == ("url" in raw):
        raise ValueError
    if "url" in raw:
        url = raw["url"]
        if set(raw) - {"name", "url", "headers"} or not _is_text(url) or not is_url(url) or redact(url) != url:
            raise ValueError
        return McpServer(name, url=url, headers=_values(raw.get("headers"), HEADER, secret=True))
    command, args = raw["command"], raw.get("args", [])
    if set(raw) - {"name", "command", "args", "env"} or not _is_text(command) or not command.strip():
        raise ValueError
    if not isinstance(args, list | tuple) or len(args) > _MAX_ARGS or not all(map(_is_text, args)):
        raise ValueError
    if any(redact(one) != one for one in args):
        raise ValueError
    return McpServer(name, command, tuple(args), _values(raw.get("env"), _VARIABLE, secret=False))


def _values(raw: Any, name: re.Pattern[str], *, secret: bool) -> dict[str, str]:
    """`secret`: none of them may stand there itself."""
    raw = {} if raw is None else raw
    if not isinstance(raw, Mapping) or len(raw) > _MAX_ARGS:
        raise ValueError
    for key, value in raw.items():
        if not isinstance(key, str) or not name.fullmatch(key) or not _is_text(value):
            raise ValueError
        kept = secret or names_a_key(key) or redact(value) != value
        if kept and not _REFERENCE.fullmatch(value):
            raise ValueError
    return dict(raw)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARS and (value.isprintable() or not value)
