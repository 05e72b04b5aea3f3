"""What `check-tasks` has seen of tasks, in a file beside them.

    {"schema": 1, "tasks": {"TASK_ID": {"scope": ["/app"], "takeovers": [], "source": "reward.txt",
                                        "duration_s": 1.2, "layer": null}}}

`layer`: the name of a folder of `launch.workspaces`, and never a path: a data set may be anybody's.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.text import path_of
from orchestrator.tasks.base import BadRow
from orchestrator.tasks.surroundings import absolute
from orchestrator.types import Checked, Task

SCHEMA = 1
_BYTES = 256 << 20
_IN_FILES = ("jsonl:", "csv:")
_IN_FOLDERS = ("harbor:",)
_LAYER = re.compile("[0-9a-f]{64}")
_CHECKS = TypeAdapter(dict[str, Checked])


def checks_file(dataset: str) -> Path | None:
    """Where it is for this `env.dataset`; None: such a data set has none."""
    kind, _, name = dataset.partition(":")
    path = path_of(name) if f"{kind}:" in (*_IN_FILES, *_IN_FOLDERS) else None
    if path is None:
        return None
    in_folder = f"{kind}:" in _IN_FOLDERS and path.is_dir()
    return path / "checks.json" if in_folder else path.with_name(f"{path.name}.checks.json")


def read_checks(file: Path | None) -> Mapping[str, Checked]:
    """By task id; empty where there is no such file. Blocks. Raises ConfigError."""
    if file is None or not file.is_file():
        return {}
    with os_error_as(ConfigError, f"{file} cannot be read"), file.open("rb") as opened:
        content = opened.read(_BYTES + 1)
    try:
        if len(content) > _BYTES:
            raise ValueError(f"it has more than {_BYTES} bytes")
        value: Any = json.loads(content)
        if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        checks = _CHECKS.validate_json(json.dumps(value.get("tasks")), strict=True)
        return {task_id: _demand(checked) for task_id, checked in checks.items()}
    except (ValueError, RecursionError, BadRow) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{file} is not what check-tasks writes: {why}; remove it") from error


def checks_text(checks: Mapping[str, Checked]) -> str:
    """The inverse of `read_checks`."""
    return json.dumps({"schema": SCHEMA, "tasks": {name: asdict(one) for name, one in checks.items()}}, indent=1)


def with_checked(task: Task, checks: Mapping[str, Checked]) -> Task:
    """The task, and what is known of its grader."""
    checked = checks.get(task.task_id)
    if task.grader is None or checked is None:
        return task
    return replace(task, grader=replace(task.grader, checked=checked))


def _demand(checked: Checked) -> Checked:
    """Raises ValueError, BadRow."""
    for path in (*(checked.scope or ()), *checked.takeovers):
        absolute(path, "a path")
    if checked.layer is not None and not _LAYER.fullmatch(checked.layer):
        raise ValueError("the name of a layer is no digest")
    return checked
