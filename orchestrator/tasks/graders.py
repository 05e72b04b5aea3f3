"""What grades a task's end state, as its row says it in `grader`.

Raises BadRow, which names what is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.cells import cell_text, kind_of, plain
from orchestrator.tasks.surroundings import absolute, cwd_of, environment_of, user_of
from orchestrator.types import Case, Collect, Grader, GraderKind, Service

MAX_CASES = 200
MAX_COLLECTED = 20
MAX_TEXT_BYTES = 1 << 20  # of an input or an expected output
MAX_ARGUMENTS = 1000
MAX_TIMEOUT_S = 86_400.0
_SCRIPT, _SOLVE = "test.sh", "solve.sh"  # of the tests, and of the solution, in Harbor's form
_KINDS = get_args(GraderKind)
_COMMON = {"kind", "timeout", "artifacts", "user", "cwd", "env", "solution", "collect"}
_COLLECT = {"service", "command", "timeout", "user"}
_KEYS = {
    "command": _COMMON | {"command", "tests"},
    "io": _COMMON | {"command", "cases"},
    "harbor": _COMMON | {"tests"},
}
_CASE = {"arguments", "stdin", "expected"}

Find = Callable[[str, str], Path]


def grader_of(value: Mapping[Any, Any], find: Find) -> Grader | None:
    """`value`: empty, if there is none. `find`: the file or folder beside the data set that has a name, given what
    it is."""
    value = {key: one for key, one in ((key, plain(one)) for key, one in value.items()) if one is not None}
    if not value:
        return None
    kind: Any = value.get("kind")
    if kind not in _KINDS:
        raise BadRow(f"grader.kind {ascii(kind)[:60]} is unknown; valid are {', '.join(_KINDS)}")
    if odd := sorted(map(str, set(value) - _KEYS[kind])):
        raise BadRow(f"grader.{odd[0][:60]} is unknown for the kind {kind}; valid are {_listed(_KEYS[kind])}")
    artifacts = _texts(value, "artifacts")
    return Grader(
        kind=kind,
        tests=_tests(kind, value, find),
        solution=_folder("solution", value, _SOLVE, find),
        command=_command(kind, value),
        cases=_cases(kind, value),
        timeout_s=_timeout(value),
        collect=_collect(value),
        declared=None if artifacts is None else tuple(absolute(path, "grader.artifacts") for path in artifacts),
        user=user_of(value),
        cwd=cwd_of(value),
        environment=environment_of(value),
    )


def demand_services(grader: Grader | None, services: Sequence[Service]) -> None:
    """Raises BadRow where the grader asks one that there is not."""
    names = {service.name for service in services}
    for one in () if grader is None else grader.collect:
        if one.service not in names:
            raise BadRow(f"grader.collect asks the service {ascii(one.service)[:40]}, which there is not")


def _collect(value: Mapping[Any, Any]) -> tuple[Collect, ...]:
    """Commands that ask services for their state."""
    found = plain(value.get("collect")) or []
    if not isinstance(found, list | tuple) or len(found) > MAX_COLLECTED:
        raise BadRow(f"grader.collect must be a list of at most {MAX_COLLECTED} objects with {_listed(_COLLECT)}")
    commands = []
    for number, one in enumerate(found):
        where = f"grader.collect[{number}]"
        if not isinstance(one, Mapping) or not set(one) <= _COLLECT:
            raise BadRow(f"{where} must be an object with {_listed(_COLLECT)}; timeout and user may be left out")
        service, command = (_text(plain(one.get(name)), f"{where}.{name}") for name in ("service", "command"))
        if not command.strip() or "\0" in command:
            raise BadRow(f"{where}.command is missing: a text for the shell")
        commands.append(Collect(command, _timeout({"timeout": 60.0, **one}), user_of(one), service))
    return tuple(commands)


def _tests(kind: str, value: Mapping[Any, Any], find: Find) -> str | None:
    if kind == "harbor" and value.get("tests") is None:
        raise BadRow(f"grader.tests is missing: the folder with {_SCRIPT}")
    return _folder("tests", value, _SCRIPT if kind == "harbor" else None, find)


def _folder(key: str, value: Mapping[Any, Any], script: str | None, find: Find) -> str | None:
    """`script`: what it must have."""
    name = value.get(key)
    if name is None:
        return None
    if not isinstance(name, str):
        raise BadRow(f"grader.{key} must be the name of a folder, not {kind_of(name)}")
    folder = find(f"grader.{key}", name)
    if not folder.is_dir():
        raise BadRow(f"grader.{key} {ascii(name)[:60]} is no folder")
    if script is not None and not (folder / script).is_file():
        raise BadRow(f"grader.{key} {ascii(name)[:60]} has no {script}")
    return str(folder)


def _command(kind: str, value: Mapping[Any, Any]) -> tuple[str, ...]:
    """A text is one for the shell."""
    if kind == "harbor":
        return ()
    command = value.get("command")
    if isinstance(command, str) and command.strip():
        return ("/bin/sh", "-c", f'{_text(command, "grader.command")} "$@"' if kind == "io" else command, "sh")
    words = _texts(value, "command")
    if not words or not words[0]:
        raise BadRow("grader.command is missing: a text for the shell, or a list of a program and its arguments")
    return words


def _cases(kind: str, value: Mapping[Any, Any]) -> tuple[Case, ...]:
    if kind != "io":
        return ()
    cases = value.get("cases")
    if not isinstance(cases, list | tuple) or not 0 < len(cases) <= MAX_CASES:
        raise BadRow(f"grader.cases must be a list of 1 to {MAX_CASES} objects with {_listed(_CASE)}")
    return tuple(_case(case, f"grader.cases[{number}]") for number, case in enumerate(cases))


def _case(case: object, where: str) -> Case:
    if not isinstance(case, Mapping) or not set(case) <= _CASE or "expected" not in case:
        raise BadRow(f"{where} must be an object with {_listed(_CASE)}; arguments and stdin may be left out")
    stdin, expected = (_text(plain(case.get(name)), f"{where}.{name}") for name in ("stdin", "expected"))
    return Case(_texts(case, "arguments", where) or (), stdin, expected)


def _text(value: object, what: str) -> str:
    return "" if value is None else cell_text(value, what, MAX_TEXT_BYTES)


def _texts(value: Mapping[Any, Any], name: str, where: str = "grader") -> tuple[str, ...] | None:
    """None: it has none."""
    texts = plain(value.get(name))
    if texts is None:
        return None
    if not isinstance(texts, list | tuple) or len(texts) > MAX_ARGUMENTS:
        raise BadRow(f"{where}.{name} must be a list of at most {MAX_ARGUMENTS} texts, not {kind_of(texts)}")
    words = tuple(_text(plain(text), f"{where}.{name}") for text in texts)
    if any("\0" in word for word in words):
        raise BadRow(f"{where}.{name} holds a NUL character")
    return words


def _timeout(value: Mapping[Any, Any]) -> float:
    seconds = value.get("timeout", Grader.__dataclass_fields__["timeout_s"].default)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise BadRow(f"grader.timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}")
    return float(seconds)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
