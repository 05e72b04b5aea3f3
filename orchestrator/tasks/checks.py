"""What `check-tasks` has found of tasks, in a file beside them, or in the user's cache where that folder cannot be
written to.

    {"schema": 2, "tasks": {"TASK_ID": {"content": "9f…", "failures": [], "checked": {"scope": ["/app"], …}, …}}}

A check counts for the task that was checked: one that has changed since has none. `layer`: the name of a folder of
`launch.workspaces`, and never a path: a data set may be anybody's.
"""

import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.text import path_of
from orchestrator.tasks.base import BadRow, Source
from orchestrator.tasks.content import content_of
from orchestrator.tasks.surroundings import absolute
from orchestrator.types import BadTask, Task, TaskCheck

SCHEMA = 2
_BYTES = 256 << 20
_IN_FILES = ("jsonl:", "csv:")
_IN_FOLDERS = ("harbor:",)
_LAYER = re.compile("[0-9a-f]{64}")
_CHECKS = TypeAdapter(dict[str, TaskCheck])
PASSED = "passed their check"
_FAILED, _UNCHECKED, _CHANGED = "failed it", "were not checked", "have changed since"
_UNUSABLE, _UNGRADED = "cannot be used", "have no grader"


def checks_file(dataset: str) -> Path | None:
    """Where it is beside the tasks of this `env.dataset`; None: such a data set has none."""
    kind, _, name = dataset.partition(":")
    path = path_of(name) if f"{kind}:" in (*_IN_FILES, *_IN_FOLDERS) else None
    if path is None:
        return None
    in_folder = f"{kind}:" in _IN_FOLDERS and path.is_dir()
    return path / "checks.json" if in_folder else path.with_name(f"{path.name}.checks.json")


def cached_file(file: Path) -> Path:
    """The one in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.fsencode(file.absolute().resolve())).hexdigest()
    return base / "rollout-orchestrator" / "checks" / f"{name}.json"


def read_checks(file: Path | None) -> Mapping[str, TaskCheck]:
    """By task id; empty where there is no such file. What the user's cache has comes first. Blocks. Raises
    ConfigError."""
    if file is None:
        return {}
    return {**_read(file), **_read(cached_file(file))}


def write_checks(file: Path, checks: Mapping[str, TaskCheck]) -> Path:
    """Replaces the file, whole or not at all, and returns which one. Blocks. Raises ConfigError."""
    text = checks_text(checks)
    cached = cached_file(file)
    try:
        _replace(file, text)
    except OSError:
        with os_error_as(ConfigError, f"neither {file} nor {cached} can be written"):
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(cached, text)
        return cached
    with suppress(FileNotFoundError):
        cached.unlink()  # all of it is in `checks`
    return file


def checks_text(checks: Mapping[str, TaskCheck]) -> str:
    """The inverse of reading."""
    return json.dumps({"schema": SCHEMA, "tasks": {name: asdict(one) for name, one in checks.items()}}, indent=1)


def check_of(task: Task, checks: Mapping[str, TaskCheck]) -> TaskCheck | None:
    """None: the task, as it is now, was not checked. Blocks."""
    check = checks.get(task.task_id)
    try:
        return check if check is not None and task.grader and check.content == content_of(task) else None
    except OSError:  # whoever uses the task finds that
        return None


def with_checked(task: Task, checks: Mapping[str, TaskCheck]) -> Task:
    """The task, and what is known of its grader. Blocks."""
    check = check_of(task, checks)
    if task.grader is None or check is None:
        return task
    known = iter(check.steps or (check.checked,))
    return task.with_graders(lambda grader: replace(grader, checked=next(known, None)))


def only_checked(source: Source, file: Path | None) -> Source:
    """The tasks that passed their check; the notes count the others. Blocks. Raises ConfigError."""
    checks = read_checks(file)

    def read() -> Iterator[Task | BadTask]:
        return (task for task in source if _state(task, checks) == PASSED)

    def notes() -> tuple[str, ...]:
        counts = Counter(_state(task, checks) for task in source)
        passed = counts.pop(PASSED, 0)
        others = [f"{count} {what}" for what, count in counts.most_common()]
        left_out = f"; left out: {', '.join(others)}" if others else ""
        return *source.notes(), f"of {passed + counts.total()} tasks {passed} {PASSED}{left_out}"

    return replace(source, read=read, size=None, notes=notes)


def _state(task: Task | BadTask, checks: Mapping[str, TaskCheck]) -> str:
    if isinstance(task, BadTask):
        return _UNUSABLE
    if task.grader is None:
        return _UNGRADED
    if task.task_id not in checks:
        return _UNCHECKED
    check = check_of(task, checks)
    if check is None:
        return _CHANGED
    return _FAILED if check.failures else PASSED


def _read(file: Path) -> Mapping[str, TaskCheck]:
    if not file.is_file():
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
        return {task_id: _demand(check) for task_id, check in checks.items()}
    except (ValueError, RecursionError, BadRow) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{file} is not what check-tasks writes: {why}; remove it") from error


def _replace(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _demand(check: TaskCheck) -> TaskCheck:
    """Raises ValueError, BadRow."""
    for checked in (check.checked, *check.steps):
        for path in (*(checked.scope or ()), *checked.takeovers):
            absolute(path, "a path")
    layers = (
        *(one.layer for one in (check.checked, *check.steps)),
        None if check.dry_run is None else check.dry_run.layer,
    )
    if any(layer is not None and not _LAYER.fullmatch(layer) for layer in layers):
        raise ValueError("the name of a layer is no digest")
    return check
