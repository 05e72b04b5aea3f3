"""Finds the files of a run from its directory or from its groups file. Their content is untrusted."""

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.text import printable
from orchestrator.run.frames import SUFFIX, is_compressed
from orchestrator.run.lenient import mapping, small_object
from orchestrator.run.lines import MAX_RUN_FILE_BYTES

RUN_FILE = "run.json"
ROLLOUTS_FILE = "rollouts.jsonl"
GROUPS_FILE = "groups.jsonl"
DROPPED_FILE = "dropped.jsonl"
CURRICULUM_FILE = "curriculum.jsonl"
EVALUATE = "evaluate"  # the `command` of an evaluation's run.json
EVALUATION_PAGE = "evaluation.html"
SCHEMA = 1  # of run.json, and of all lines but those of attempts


@dataclass(frozen=True, slots=True)
class RunFiles:
    """`directory`: the run directory; None for a groups file alone. `groups`: None for a run without one."""

    directory: Path | None
    groups: Path | None

    @property
    def name(self) -> Path:
        """The path to show for the run."""
        path = self.directory or self.groups
        assert path is not None
        return path


def record_of(directory: Path) -> Path | None:
    """The record in a run directory, plain or compressed; None if it has none. If both exist, because it was
    unpacked, the one that the run writes."""
    plain = directory / ROLLOUTS_FILE
    places = [place for place in (plain, packed_name(plain)) if place.is_file()]
    packs = len(places) > 1 and saved_env(read_description(directory)).get("compress") == "zstd"
    return next(iter(reversed(places) if packs else places), None)


def groups_in(directory: Path, named: str | None) -> Path | None:
    """The groups file of a run directory whose run.json has `named`; None if there is none."""
    plain = directory / GROUPS_FILE
    places = [*([directory / named] if named is not None else []), plain, packed_name(plain)]
    return next((place for place in places if place.is_file()), None)


def packed_name(plain: Path) -> Path:
    """The name of the same file with compressed lines."""
    return plain if is_compressed(plain) else plain.with_name(plain.name + SUFFIX)


def report_beside(groups: Path) -> Path:
    """Where the report of this groups file goes."""
    plain = groups.with_suffix("") if is_compressed(groups) else groups
    return plain.with_suffix(".html")


def report_of(files: RunFiles) -> Path:
    """Where the report of a run goes: into its directory, or beside a groups file alone."""
    if files.directory is None:
        assert files.groups is not None
        return report_beside(files.groups)
    if files.groups is not None:
        return files.directory / report_beside(files.groups).name
    evaluation = read_description(files.directory).get("command") == EVALUATE
    return files.directory / (EVALUATION_PAGE if evaluation else "report.html")


def find_run(path: Path) -> RunFiles:
    """`path` is a run directory, a file in it, or a groups file anywhere. Raises ConfigError."""
    with os_error_as(ConfigError, f"{path} cannot be read"):
        if path.is_file() and path.name in (RUN_FILE, ROLLOUTS_FILE, ROLLOUTS_FILE + SUFFIX):
            path = path.parent
        if path.is_dir():
            return _in_directory(path)
        if path.is_file():
            beside = record_of(path.parent) is not None
            return RunFiles(path.parent if beside else None, path)
    raise ConfigError(f"{path} is neither a run directory nor a groups file")


def read_run(directory: Path, setting: str = "env.resume") -> Mapping[str, Any]:
    """run.json, read strictly. Raises ConfigError, which names the setting `setting`."""
    path = directory / RUN_FILE
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ConfigError(f"{setting}: {path} is not a file")
        with path.open("rb") as file:
            description = orjson.loads(file.read(MAX_RUN_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"{setting}: no run in {directory}: {RUN_FILE}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not valid JSON") from error
    if not isinstance(description, dict) or not isinstance(description.get("config"), dict):
        raise ConfigError(f"{setting}: {path} does not describe a run")
    try:
        orjson.dumps(description)  # for its proof, and to be handed on
    except TypeError:
        raise ConfigError(f"{setting}: {path} is nested too deep to describe a run") from None
    return description


def read_recorded(directory: Path, setting: str) -> tuple[Mapping[str, Any], Path]:
    """(run.json, path of the record) of a run that this version can read. Raises ConfigError, which names the
    setting `setting`."""
    description, record = read_run(directory, setting), record_of(directory)
    if description.get("schema") != SCHEMA:
        other = printable(str(description.get("schema")))[:40]
        raise ConfigError(f"{setting}: {directory} has schema {other}; this version reads {SCHEMA}")
    if record is None:
        raise ConfigError(f"{setting}: {directory} holds no {ROLLOUTS_FILE}")
    return description, record


def groups_file_of(description: Mapping[str, Any]) -> str | None:
    """The path of the groups file in a run.json, relative to its directory or absolute; None if it names none."""
    named = description.get("groups_file")
    return named if isinstance(named, str) and named and "\0" not in named else None


def read_description(directory: Path) -> dict[str, Any]:
    """run.json, for display; empty if it cannot be read."""
    return small_object(directory / RUN_FILE, MAX_RUN_FILE_BYTES)


def is_going_on(directory: Path) -> bool:
    """Whether an orchestrator is using this run directory now."""
    try:
        if not (lock := directory / "lock").is_file():
            return False
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def saved_env(description: dict[str, Any]) -> dict[str, Any]:
    """The `env.*` settings in a run.json, unchecked."""
    return mapping(mapping(description.get("config")).get("env"))


def saved_tokenizer(description: dict[str, Any]) -> tuple[object, object]:
    """(name of the run's tokenizer, arguments of its chat template) from its run.json, unchecked."""
    env = saved_env(description)
    return description.get("tokenizer") or env.get("tokenizer_name"), env.get("chat_template_kwargs")


def _in_directory(directory: Path) -> RunFiles:
    description = read_description(directory)
    groups = groups_in(directory, groups_file_of(description))
    if not description and groups is None and record_of(directory) is None:
        raise ConfigError(f"{directory} holds no run: neither {RUN_FILE} nor {ROLLOUTS_FILE} nor {GROUPS_FILE}")
    return RunFiles(directory, groups)
