"""Where a task's agent works, as its row says it: root, working directory, user, variables.

Raises BadRow for what could not be had in a sandbox, or would break what runs beside the agent.
"""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.cells import FOREIGN, cell_text, kind_of, plain

MAX_VARIABLES = 100
MAX_VALUE_BYTES = 32 << 10
MAX_VALUES_BYTES = 64 << 10
MAX_PATH_BYTES = 1024
_MAX_ID = 65_535  # a sandbox has so many users
_ROOTS = ("read-only", "writable")
_NAME = re.compile(r"[A-Za-z_]\w{0,127}", re.ASCII)
_USER = re.compile(r"[A-Za-z_][\w.-]{0,31}|\d{1,5}(:\d{1,5})?", re.ASCII)
# By which programs find the sandbox's endpoint and leave their answer, and by which Python and the loader of the
# sandbox's own programs would find other libraries.
_OURS = re.compile(r"(OPENAI|ANTHROPIC|LD)_.*|ANSWER_FILE|PYTHONHOME|GLIBC_TUNABLES")


def surroundings(row: Mapping[Any, Any]) -> dict[str, Any]:
    """`root`, `cwd`, `user` and `environment` of a Task. The row's column of the last is `env`."""
    root = _text(row, "root")
    if root is not None and root not in _ROOTS:
        raise BadRow(f"root {ascii(root)[:60]} is unknown; valid are {', '.join(_ROOTS)}")
    return {"root": root, "cwd": cwd_of(row), "user": user_of(row), "environment": environment_of(row)}


def cwd_of(row: Mapping[Any, Any]) -> str | None:
    """The working directory; None: it does not say it."""
    cwd = _text(row, "cwd")
    return None if cwd is None else absolute(cwd, "cwd")


def user_of(row: Mapping[Any, Any]) -> str | None:
    """As of a SandboxSpec; None: it does not say it."""
    user = _text(row, "user")
    if user is not None and not (_USER.fullmatch(user) and _fits(user)):
        raise BadRow(f"user {ascii(user)[:60]} is no name and no UID[:GID] of at most {_MAX_ID}")
    return user


def _text(row: Mapping[Any, Any], name: str) -> str | None:
    value = plain(row.get(name))
    return cell_text(value, name, MAX_PATH_BYTES) or None if value is not None else None


def absolute(path: str, what: str) -> str:
    """The path, in its simplest form."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or "\0" in path:
        raise BadRow(f"{what} {ascii(path)[:60]} must be an absolute path in the sandbox, without `..`")
    return "/" + "/".join(parts)


def _fits(user: str) -> bool:
    return all(not number.isdecimal() or int(number) <= _MAX_ID for number in user.split(":"))


def environment_of(row: Mapping[Any, Any]) -> dict[str, str]:
    """The variables of its column `env`."""
    value = row.get("env")
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping) or FOREIGN in value:
        raise BadRow(f"env must be an object of texts, not {kind_of(value)}")
    variables = {str(name): plain(text) for name, text in value.items()}
    variables = {name: text for name, text in variables.items() if text is not None}  # parquet's absent ones
    if len(variables) > MAX_VARIABLES:
        raise BadRow(f"env has {len(variables)} variables, at most {MAX_VARIABLES} are allowed")
    for name, text in variables.items():
        if not _NAME.fullmatch(name):
            raise BadRow(f"env names {ascii(name)[:60]}, which is no name of a variable")
        if _OURS.fullmatch(name):
            raise BadRow(f"env sets {name}, which the sandbox needs for itself: leave it out")
        variables[name] = cell_text(text, f"env {name}", MAX_VALUE_BYTES)
        if "\0" in variables[name]:
            raise BadRow(f"env {name} has a NUL in it")
    if sum(len(name) + len(text.encode()) for name, text in variables.items()) > MAX_VALUES_BYTES:
        raise BadRow(f"env has more than {MAX_VALUES_BYTES} bytes")
    return variables
