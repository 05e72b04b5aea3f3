"""A run that is read as a whole by what comes after it: scored again, or exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.text import printable
from orchestrator.run.files import ROLLOUTS_FILE, read_run, record_of
from orchestrator.run.line import SCHEMA


def read_recorded(directory: Path, asked: str) -> tuple[Mapping[str, Any], Path]:
    """(run.json, path of the record) of a run that this version can read. Raises ConfigError, which names the
    setting `asked`."""
    told, record = read_run(directory, asked), record_of(directory)
    if told.get("schema") != SCHEMA:
        other = printable(str(told.get("schema")))[:40]
        raise ConfigError(f"{asked}: {directory} has schema {other}; this version reads {SCHEMA}")
    if record is None:
        raise ConfigError(f"{asked}: {directory} holds no {ROLLOUTS_FILE}")
    return told, record
