"""Reads keys that settings name as `env:NAME` or `file:PATH`, so that no key stands in a configuration."""

import os
from collections.abc import Mapping

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.redact import Secret
from orchestrator.rules.text import path_of

ENV, FILE = "env:", "file:"
MAX_KEY_BYTES = 64 << 10


def read_key(source: str, where: str, environment: Mapping[str, str] = os.environ) -> Secret:
    """One line of text. `where`: the setting that names it, for errors. Blocks. Raises ConfigError, which has
    nothing of the key."""
    if source.startswith(ENV):
        text = environment.get(source.removeprefix(ENV), "").strip()
        if not text:
            raise ConfigError(f"{where}: the variable {source.removeprefix(ENV)} is not set")
    else:
        text = _in_file(source.removeprefix(FILE), where)
    if not text.isprintable():
        raise ConfigError(f"{where}: {source} has more than one line, or a character that is not printable")
    return Secret(text)


def _in_file(name: str, where: str) -> str:
    try:
        path = path_of(name)
    except ValueError:
        raise ConfigError(f"{where}: {name} cannot be the path of a file") from None
    with os_error_as(ConfigError, f"{where}: cannot read {path}"), path.open("rb") as file:
        content = file.read(MAX_KEY_BYTES + 1)
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(content) > MAX_KEY_BYTES:
        raise ConfigError(f"{where}: {path} holds no text of at most {MAX_KEY_BYTES} bytes")
    return text
