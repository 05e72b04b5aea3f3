"""Reads a Dockerfile: the forms of instructions that Dockerfile.sandbox uses. Pure.

What is not known here is refused by name, never passed over: an image must not lack something in silence.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.errors import EnvironmentUnusable

_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=", re.IGNORECASE)
_CONTINUED = re.compile(r"\\[ \t]*$")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class From:
    """Begins a stage on an image, with its configuration; `scratch`: on nothing."""

    base: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Arg:
    """Declares build arguments with their defaults. Before the first FROM they are known to FROM alone."""

    defaults: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Env:
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Label:
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class User:
    user: str


@dataclass(frozen=True, slots=True)
class Copy:
    """From the build context into the folder `target`; `*` and `[…]` match within one component of a path."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class CopyStage:
    """All files of an earlier stage, into a stage that has none yet."""

    stage: str


@dataclass(frozen=True, slots=True)
class Run:
    """A script for the shell. Variables in it are the shell's."""

    script: str


@dataclass(frozen=True, slots=True)
class EntryPoint:
    argv: tuple[str, ...]


Instruction = From | Arg | Env | Label | User | Copy | CopyStage | Run | EntryPoint


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction, and the text that tells people which one it is."""

    shown: str
    instruction: Instruction


def parse(text: str) -> tuple[Step, ...]:
    """The steps of a Dockerfile. Raises EnvironmentUnusable, which names the line, for what is not known here."""
    steps: list[Step] = []
    begun = False
    for number, line in _instructions(text):
        name, rest = (*line.split(None, 1), "")[:2]
        try:
            if name not in _READERS:
                raise ValueError("no such instruction is known here")
            instruction = _READERS[name](rest.strip())
            begun = begun or isinstance(instruction, From)
            if not begun and not isinstance(instruction, Arg):
                raise ValueError("it stands before FROM")
        except ValueError as error:
            raise EnvironmentUnusable(f"Dockerfile, line {number}, {name}: {error}") from None
        steps.append(Step(" ".join(line.partition(";")[0].split())[:_SHOWN_CHARS], instruction))
    if not begun:
        raise EnvironmentUnusable("Dockerfile: it has no FROM")
    return tuple(steps)


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with the variables' values; what has none is empty, as Docker has it."""
    return _VARIABLE.sub(lambda found: values.get(found[1], ""), text)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, the whole instruction in one line), without comments."""
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if _DIRECTIVE.match(line):
            raise EnvironmentUnusable(f"Dockerfile, line {number}: no parser directive is known here: {line}")
        if not line.strip() or line.lstrip().startswith("#"):  # also amid an instruction
            continue
        first = first if joined else number
        joined += _CONTINUED.sub("", line)
        if not _CONTINUED.search(line):
            yield first, joined
            joined = ""
    if joined:
        yield first, joined


# ---------------------------------------------------------------- one instruction each; ValueError: not known here


def _from(rest: str) -> From:
    match _words(rest):
        case [base]:
            return From(base, None)
        case [base, "AS", name]:
            return From(base, name)
    raise ValueError("only `FROM IMAGE` and `FROM IMAGE AS NAME` are known here")


def _arg(rest: str) -> Arg:
    pairs = [word.partition("=") for word in _words(rest)]
    return Arg({_named(name): value if equals else None for name, equals, value in pairs})


def _pairs(rest: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in _words(rest)]
    if not pairs or not all(equals for _, equals, _ in pairs):
        raise ValueError("only NAME=VALUE is known here")
    return {_named(name): value for name, _, value in pairs}


def _user(rest: str) -> User:
    if rest not in ("0", "0:0", "root"):
        raise ValueError(f"steps run as root, not as {rest}")
    return User(rest)


def _copy(rest: str) -> Copy | CopyStage:
    words = _words(rest)
    match words:
        case [option, "/", "/"] if re.fullmatch(r"--from=\w+", option):
            return CopyStage(option.removeprefix("--from="))
        case [str(first), *_, target] if target.startswith("/") and target.endswith("/") and first[0] not in "-[":
            if ".." not in "/".join(words).split("/"):
                return Copy(tuple(words[:-1]), target)
    raise ValueError("only `COPY SOURCE… /FOLDER/` and `COPY --from=STAGE / /` are known here")


def _run(rest: str) -> Run:
    if not rest or rest.startswith(("--", "[")) or "<<" in rest:
        raise ValueError("only a script for the shell is known here, without options and here-documents")
    return Run(rest)


def _entry_point(rest: str) -> EntryPoint:
    try:
        argv = json.loads(rest)
    except ValueError:
        argv = None
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise ValueError("only a JSON array of strings is known here")
    return EntryPoint(tuple(argv))


_READERS: Mapping[str, Callable[[str], Instruction]] = {
    "FROM": _from,
    "ARG": _arg,
    "ENV": lambda rest: Env(_pairs(rest)),
    "LABEL": lambda rest: Label(_pairs(rest)),
    "USER": _user,
    "COPY": _copy,
    "RUN": _run,
    "ENTRYPOINT": _entry_point,
}


def _words(rest: str) -> list[str]:
    if "\\" in rest or "'" in rest:
        raise ValueError("neither backslashes nor single quotes are known here")
    if "$" in _VARIABLE.sub("", rest):
        raise ValueError("variables are known here as ${NAME} alone")
    return shlex.split(rest)


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name or 'nothing'} is no name")
    return name
