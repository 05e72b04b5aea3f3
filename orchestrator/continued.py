"""The settings of a run that is continued with `--env.resume`: what run.json says, and what may differ.

Whatever decides what the data are stays as it was; where things run, how many at once and how long to
wait for them is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError
from orchestrator.setting import Layer, give
from orchestrator.settings import ATROPOS, SECTIONS

RUN_FILE = "run.json"
MODEL = "openai.model_name"
_KEY_MARK = "[key]"
# What a replay takes from a run that may be somebody else's: nothing that decides what confines its code, which
# code of ours is called, or where keys are sent.
_REPLAYED = frozenset(
    {
        "agent", "columns", "combined_weights", "dataset", "dataset_path", "eval_split", "length_penalty_weight",
        "sandbox_cpus", "sandbox_memory", "sandbox_pids", "scoring_strategy", "seed", "split",
        "token_source", "tokenizer_name",
    }
)  # fmt: skip
_OWN = frozenset({"host_tools", "prompt_templates", "sandbox_tools"})  # files and code of the operator's
_FREE = frozenset(
    {
        "agent_verbosity", "data_dir_to_save_evals", "debug_scoring", "drain_timeout", "fsync",
        "max_concurrent_sandboxes", "max_open_groups", "max_retries", "resume", "run_dir", "save_full_traces",
        "total_steps", "warm_sandboxes",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """What a run was begun with, its seed included."""

    directory: Path
    env: Layer
    servers: list[Layer]

    @classmethod
    def read(cls, directory: Path, asked: str = "env.resume") -> SavedSettings:
        """From run.json. Raises ConfigError, naming what asked for it."""
        told = read_run(directory, asked)
        config, where = told["config"], f"{directory / RUN_FILE}: "
        env = {k: v for k, v in _mapping(config.get("env"), where).items() if k not in ("resume", "run_dir")}
        servers = config.get("openai")
        if not isinstance(servers, list) or not servers:
            raise ConfigError(f"{where}it names no server")
        return cls(
            directory,
            _layer("env", {**env, "seed": told.get("seed")}, where),
            [_layer("openai", _mapping(server, where), where) for server in servers],
        )

    def below(self, env: Layer) -> Layer:
        """`env` settings, the run's own where none is given. Raises ConfigError, by name, for one that would
        make other data than the run has."""
        rows = SECTIONS["env"].rows()
        for name, row in rows.items():
            given, known = env.get(row.key), self.env.get(row.key)
            if given is None or known is None or name in _FREE or row.group == ATROPOS:
                continue
            if given.value != known.value:
                raise ConfigError(
                    f"{given.label}: the run in {self.directory} has {_short(known.value)}, and a run is "
                    "continued as it began; leave this out, or start a new run"
                )
        return self.env | env

    def replayed(self, env: Layer) -> Layer:
        """`env` settings, those of the run that a replay needs where none is given. Raises ConfigError for code or
        services a run names, which its operator has to name again."""
        rows = SECTIONS["env"].rows()
        for key, given in self.env.items():
            name, value = key.removeprefix("env."), given.value
            own = name in _OWN and value != rows[name].default
            own = own or (
                isinstance(value, str) and (value.startswith(("python:", "program:")) or value == "judge")
            )
            if own and key not in env:
                raise ConfigError(
                    f"the run in {self.directory} has {key} {_short(value)}: say --{key} yourself, that one or "
                    "another; a recording decides neither what code is called nor who is asked"
                )
        kept = {key: given for key, given in self.env.items() if key.removeprefix("env.") in _REPLAYED}
        return kept | env

    def demand_models(self, servers: Sequence[Layer]) -> None:
        """Servers may move, their models may not change. Raises ConfigError."""
        saved, given = ({s[MODEL].value for s in some if MODEL in s} for some in (self.servers, servers))
        if saved != given:
            raise ConfigError(
                f"{MODEL}: the run in {self.directory} samples from {', '.join(sorted(saved))}, not from "
                f"{', '.join(sorted(given)) or 'the default'}; start a new run for another model"
            )


def read_run(directory: Path, asked: str = "env.resume") -> Mapping[str, Any]:
    """run.json. Raises ConfigError, naming what asked for it."""
    path = directory / RUN_FILE
    try:
        told = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{asked}: no run in {directory}: {RUN_FILE}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{asked}: {path} is no JSON") from error
    if not isinstance(told, dict) or not isinstance(told.get("config"), dict):
        raise ConfigError(f"{asked}: {path} does not describe a run")
    return told


def _layer(section: str, values: Mapping[str, Any], where: str) -> Layer:
    layer: Layer = {}
    rows = SECTIONS[section].rows()
    for name, raw in values.items():
        if name not in rows:
            raise ConfigError(f"{where}{section}.{name} is unknown here: another version made this run")
        if isinstance(raw, str) and _KEY_MARK in raw:
            continue  # a key was in it, which no file holds: it must be given again
        give(layer, rows[name], raw, f"{where}{section}.{name}")
    return layer


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}it describes no run")
    return value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."
