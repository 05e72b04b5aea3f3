"""The settings of a run that is resumed, replayed or scored again: what run.json says, and what may differ.

On resume, settings that decide about the data must stay the same. Where things run, how many at once and how long
to wait may change. A run directory may be somebody else's: then only settings about data are taken from it, and
the operator has to name addresses, code, confinement and files to write again. `proof` tells the user's own runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.run.files import RUN_FILE, groups_file_of, read_run
from orchestrator.run.proof import is_own
from orchestrator.settings.row import PLAYS, Entry, Layer, Resume, Setting, put
from orchestrator.settings.table import SECTIONS
from orchestrator.settings.tasks import DEMO_TASKS
from orchestrator.tasks import may_bring_images

MODEL = "openai.model_name"
ADDRESS = "openai.base_url"
GROUPS_PATH = "env.data_path_to_save_groups"
LAUNCHER = "env.launcher"
DATASET = "env.dataset"
DOCKERFILES = "env.dockerfiles"
_OF_ENDPOINT = ("env.tokenizer_name", "env.token_source")
_KEY_MARK = "[key]"
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The settings that a run was begun with, its seed included.

    `own`: this user wrote the run.json on this machine, and it was not edited. `groups`: the run's groups file.
    """

    directory: Path
    env: Layer
    servers: list[Layer]
    own: bool
    groups: Path | None

    @classmethod
    def read(cls, directory: Path, label: str = "env.resume") -> SavedSettings:
        """From run.json. Raises ConfigError, which names the setting `label`."""
        description = read_run(directory, label)
        config, where = description["config"], f"{directory / RUN_FILE}: "
        env = {k: v for k, v in _mapping(config.get("env"), where).items() if k not in ("resume", "run_dir")}
        servers = config.get("openai")
        if not isinstance(servers, list) or not servers:
            raise ConfigError(f"{where}it names no server")
        return cls(
            directory,
            _layer("env", {**env, "seed": description.get("seed")}, where),
            [_layer("openai", _mapping(server, where), where) for server in servers],
            is_own(description),
            directory / name if (name := groups_file_of(description)) else None,
        )

    def for_resume(self, given: Layer, *, servers_given: bool) -> SavedSettings:
        """All settings of the user's own run; of another one only those that decide about data.

        Addresses, code, confinement and files outside the run directory must be `given` then. Raises ConfigError,
        with the flags to add, if the run had one that is not.
        """
        if self.own:
            return self
        rows = {row.key: row for row in SECTIONS["env"].rows().values()}
        settings = {
            key: value
            for key, value in self.env.items()
            if rows[key].resume is not Resume.FREE and key != GROUPS_PATH
        }
        unconfirmed = [
            (rows[key], saved.value)
            for key, saved in settings.items()
            if _needs_consent(rows[key], saved.value) or _brings_images(key, saved.value, self.env)
        ]
        if self.groups is not None:
            settings[GROUPS_PATH] = Entry(self.groups, RUN_FILE)
            if not _is_inside(self.groups, self.directory):
                unconfirmed.append((rows[GROUPS_PATH], self.groups.absolute()))
        addresses = [server[ADDRESS].value for server in self.servers if ADDRESS in server and not servers_given]
        if len(self.servers) == 1 and any(addresses):
            unconfirmed.append((SECTIONS["openai"].rows()["base_url"], addresses[0]))
        flags = [_flag(row, value) for row, value in unconfirmed if row.key not in given]
        if len(self.servers) > 1 and any(addresses):
            flags.append(f"--config FILE.yaml with its servers ({', '.join(map(_short, addresses))})")
        if flags:
            raise ConfigError(
                f"env.resume: {self.directory / RUN_FILE} was not written by you on this machine, or was edited: "
                "what is contacted, what code runs, how it is confined and what files are written is not taken "
                f"from it; if you trust it, add: {' '.join(flags)}"
            )
        return replace(self, env=self._without_builds(settings, given))

    def continued_with(self, env: Layer) -> Layer:
        """The given `env` settings, and the run's where none is given. Raises ConfigError for a given one that
        would change the data."""
        for row in SECTIONS["env"].rows().values():
            entry, saved = env.get(row.key), self.env.get(row.key)
            if entry is None or saved is None or row.resume is None or not row.resume.stays:
                continue
            if _absolute(entry.value) != _absolute(saved.value):
                raise ConfigError(
                    f"{entry.label}: the run in {self.directory} has {_short(saved.value)}, and a run is "
                    "continued as it began; leave this out, or start a new run"
                )
        return self.env | env

    def for_command(self, command: str, env: Layer) -> Layer:
        """The given `env` settings, and where none is given the run's whose rows name this command. Raises
        ConfigError if the run names code, files of the operator's, or large sizes that are not given again."""
        settings: Layer = {}
        for row in SECTIONS["env"].rows().values():
            saved = self.env.get(row.key)
            if saved is None or command not in row.from_run:
                continue
            settings[row.key] = saved
            if row.key not in env and self._is_refused(row, saved.value, command, env):
                raise ConfigError(
                    f"the run in {self.directory} has {row.key} {_short(saved.value)}: give --{row.key} "
                    "yourself, with this value or another; a recorded run chooses neither code nor services"
                )
        return self._without_builds(settings, env) | env

    def for_branch(self, given: Layer) -> SavedSettings:
        """Without what goes with the run's own endpoint, where another one is `given`."""
        if not {ADDRESS, MODEL} & given.keys():
            return self
        return replace(self, env={key: entry for key, entry in self.env.items() if key not in _OF_ENDPOINT})

    def servers_for(self, command: str, given: Layer) -> list[Layer]:
        """The servers where none is listed. `branch` samples from those of the user's own run, unless another
        address is `given`; other commands take the model's name alone."""
        if command == "branch" and self.own and ADDRESS not in given:
            return self.servers
        return [{MODEL: self.servers[0][MODEL]} if MODEL in self.servers[0] else {}]

    def _without_builds(self, settings: Layer, given: Layer) -> Layer:
        """The settings; where somebody else's run chooses the data set, Dockerfiles of its tasks are not built."""
        chosen = not self.own and DATASET in settings and DATASET not in given
        return {**settings, DOCKERFILES: Entry(False, RUN_FILE)} if chosen else settings

    def _is_refused(self, row: Setting, value: object, command: str, env: Layer) -> bool:
        """Whether a command does not take this value from the run. Of the user's own run it takes large sizes and
        data sets that bring images, but not code: the files may be others by now."""
        if row.resume is Resume.SIZE:
            return not self.own and _needs_consent(row, value)
        images = not self.own and command in PLAYS and _brings_images(row.key, value, env)
        return images or (value not in DEMO_TASKS.values() and _needs_consent(row, value))

    def demand_models(self, servers: Sequence[Layer]) -> None:
        """Raises ConfigError unless the models are the run's. The servers' addresses may differ."""
        usual = Entry(SECTIONS["openai"].rows()["model_name"].default, MODEL)
        saved, models = ({server.get(MODEL, usual).value for server in some} for some in (self.servers, servers))
        if saved != models:
            raise ConfigError(
                f"{MODEL}: the run in {self.directory} samples from {', '.join(sorted(saved))}, not from "
                f"{', '.join(sorted(models))}; start a new run for another model"
            )


def _needs_consent(row: Setting, value: Any) -> bool:
    """Whether the operator must give this value of somebody else's run.json again."""
    match row.resume:
        case Resume.CODE:
            return _is_code(value)
        case Resume.SIZE:
            return bool(value > row.default)
        case Resume.CONFIRM | Resume.FREE_CONFIRM:
            return bool(value != row.default)
        case _:
            return False


def _is_code(value: object) -> bool:
    """Whether the value names code to run or a service to ask."""
    return isinstance(value, str) and (value.startswith(("python:", "program:")) or value == "judge")


def _brings_images(key: str, value: object, env: Layer) -> bool:
    """Whether the value names a data set whose rows may bring images that this launcher takes."""
    brings = key == DATASET and isinstance(value, str) and may_bring_images(value)
    return brings and LAUNCHER in env and env[LAUNCHER].value == "oci"


def _is_inside(path: Path, directory: Path) -> bool:
    """Whether the path is inside, by its name. `directory` refuses links that lead out of a run directory."""
    below = path.absolute().parts[len(directory.absolute().parts) :]
    return path.absolute().is_relative_to(directory.absolute()) and ".." not in below


def _flag(row: Setting, value: Any) -> str:
    shown = "none" if value is None else row.kind.show(value)
    return f"{row.flag} {shlex.quote(shown[:_SHOWN_CHARACTERS])}"


def _absolute(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value


def _layer(section: str, values: Mapping[str, Any], where: str) -> Layer:
    layer: Layer = {}
    rows = SECTIONS[section].rows()
    for name, raw in values.items():
        if name not in rows:
            raise ConfigError(f"{where}{section}.{name} is unknown here: another version made this run")
        if rows[name].secret or (isinstance(raw, str) and _KEY_MARK in raw):
            continue  # run.json holds no keys; they have to be given again
        put(layer, rows[name], raw, f"{where}{section}.{name}")
    return layer


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}it describes no run")
    return value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."
