"""Where settings come from: command line over environment over YAML over defaults.

    load_config(["--env.group_size", "4", "--openai.base_url", "http://localhost:9001/v1"])
    load_config(env={"group_size": 4}, openai={"base_url": "http://localhost:9001/v1"})

Environment: OPENAI_API_KEY, TAVILY_API_KEY, JUDGE_API_KEY, and ORCHESTRATOR_ENV__NAME and
ORCHESTRATOR_OPENAI__NAME for any setting. A `.env` file in the working directory adds variables that are not set.
No other module reads settings from the environment. `table` says which settings exist and what is valid.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret, shown
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.flags import CONFIG_FILE, dotted_flags, parse
from orchestrator.settings.row import Layer, nearest, put
from orchestrator.settings.saved import SavedSettings
from orchestrator.settings.table import JUDGE_KEY, SECTIONS, TAVILY_KEY, EnvSettings, section_rows
from orchestrator.tasks.base import Source

OPENAI_KEY = OpenAISettings.rows()["api_key"]
_KEYS = (("OPENAI_API_KEY", OPENAI_KEY), ("TAVILY_API_KEY", TAVILY_KEY), ("JUDGE_API_KEY", JUDGE_KEY))


def load_config(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    env: Mapping[str, Any] | None = None,
    openai: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    tavily_api_key: str | None = None,
) -> Config:
    """The configuration for a program that embeds the orchestrator. Keyword arguments win over `argv`.

    `argv`: flags without a command. Raises ConfigError: one line, without keys.
    """
    flags = parse(argv or (), dotted_flags())
    arguments: Layer = {}
    _put_section(arguments, "env", env or {}, "")
    if tavily_api_key:
        put(arguments, TAVILY_KEY, tavily_api_key, TAVILY_KEY.key)
    servers = None
    if isinstance(openai, Mapping):
        _put_section(arguments, "openai", openai, "")
    elif openai is not None:
        servers = _servers(list(openai), "")
    return resolve(flags | arguments, environ=environ, cwd=cwd, servers=servers)


def load_tasks(config: Config) -> Source:
    """The tasks that a program's settings name: `env.dataset` without what is held out. Raises ConfigError."""
    from orchestrator.tasks.no_tasks import tasks_to_train

    return tasks_to_train(config.env)


def resolve(
    flags: Layer,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    servers: Sequence[Layer] | None = None,
    run: Path | None = None,
    command: str = "replay",
) -> Config:
    """The configuration: `flags`, else environment, YAML, the run, defaults, in this order. `run`: the
    run directory that `command` takes settings from. Raises ConfigError."""
    cwd = cwd or _current_directory()
    surroundings = _environment(_with_dotenv(os.environ if environ is None else environ, cwd))
    config_file = flags.get(CONFIG_FILE.key)
    file_env, file_servers = _read_yaml(cwd / config_file.value) if config_file else ({}, [{}])
    layers = surroundings | flags
    env, servers = file_env | layers, file_servers if servers is None else servers
    resume = env.get("env.resume")
    if resume is not None and resume.value is not None:
        saved = SavedSettings.read(cwd / resume.value).for_resume(env, servers_given=servers != [{}])
        env = saved.continued_with(env)
        servers = _with_flags(saved.servers if servers == [{}] else servers, layers)
        saved.demand_models(servers)
    else:
        if run is not None:
            saved = SavedSettings.read(cwd / run, "RUN_DIR")
            if command == "branch":
                saved = saved.for_branch(env)
            env = saved.for_command(command, env)
            servers = saved.servers_for(command, env) if servers == [{}] else servers
        servers = _with_flags(servers, layers)
    return Config(
        env=EnvSettings(**_values("env", env)),
        openai=tuple(OpenAISettings(**_values("openai", server)) for server in servers),
        tavily_api_key=layers[TAVILY_KEY.key].value if TAVILY_KEY.key in layers else Secret(),
        judge_api_key=layers[JUDGE_KEY.key].value if JUDGE_KEY.key in layers else Secret(),
    )


def _current_directory() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current directory is gone ({error.strerror}): change to one that exists") from None


def _with_flags(servers: Sequence[Layer], layers: Layer) -> list[Layer]:
    """Puts flags and environment over a single server. Several servers only get a key where they have none."""
    if len(servers) == 1:
        return [servers[0] | layers]
    openai = {key: entry for key, entry in layers.items() if key.startswith("openai.")}
    key = openai.get(OPENAI_KEY.key)
    if key is not None and key.label == "OPENAI_API_KEY":
        del openai[OPENAI_KEY.key]
        servers = [{OPENAI_KEY.key: key} | server for server in servers]
    for entry in openai.values():
        raise ConfigError(f"{entry.label}: there are {len(servers)} servers; set it for each of them instead")
    return list(servers)


def _values(section: str, layer: Layer) -> dict[str, Any]:
    rows = SECTIONS[section].rows()
    return {name: layer[row.key].value for name, row in rows.items() if row.key in layer}


def _environment(environ: Mapping[str, str]) -> Layer:
    layer: Layer = {}
    for section in SECTIONS:
        prefix = f"ORCHESTRATOR_{section.upper()}__"
        rows = {prefix + name.upper(): row for name, row in section_rows(section).items()}
        for name, raw in environ.items():
            if not name.startswith(prefix) or not raw:
                continue
            if name not in rows:
                raise ConfigError(f"unknown environment variable {name}{nearest(name, rows)}")
            put(layer, rows[name], raw, name)
    for name, row in _KEYS:
        if row.key not in layer:
            put(layer, row, environ.get(name), name)
    return layer


def _with_dotenv(environ: Mapping[str, str], cwd: Path) -> Mapping[str, str]:
    path = cwd / ".env"
    if not path.is_file():
        return environ
    from dotenv import dotenv_values

    try:
        values = dotenv_values(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from None
    return {name: value for name, value in values.items() if value is not None} | dict(environ)


def _read_yaml(path: Path) -> tuple[Layer, list[Layer]]:
    """`env:` and the servers of `openai:`."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except yaml.MarkedYAMLError as error:
        # The error's own text quotes the file, keys included.
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}: not valid YAML at line {line}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from None
    except (ValueError, LookupError, AttributeError, OverflowError):  # the error's own text would quote the file
        raise ConfigError(f"cannot read {path}: it holds an invalid date or number; put text in quotes") from None
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold the keys env and openai")
    for key in document:
        if key not in SECTIONS:
            raise ConfigError(f"{path}: unknown key {shown(key)}{nearest(shown(key), SECTIONS, 0.3)}")
    env: Layer = {}
    _put_section(env, "env", document.get("env"), f"{path}: ")
    openai = document.get("openai")
    return env, _servers(openai if isinstance(openai, list) else [openai], f"{path}: ")


def _servers(servers: list[Any], where: str) -> list[Layer]:
    if not servers:
        raise ConfigError(f"{where}openai: an empty list; name at least one server")
    layers: list[Layer] = []
    for server in servers:
        layers.append({})
        _put_section(layers[-1], "openai", server, where)
    return layers


def _put_section(layer: Layer, section: str, values: object, where: str) -> None:
    """Adds the settings of one section to a layer. `where`: the beginning of error texts."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}{section}: must be a mapping of names to values")
    rows = section_rows(section)
    for name, raw in values.items():
        if name not in rows:
            key = shown(name)[1:-1] if isinstance(name, str) else shown(name)
            raise ConfigError(f"{where}unknown key {section}.{key}{nearest(key, rows)}")
        put(layer, rows[name], raw, f"{where}{section}.{name}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "not readable"
    return "not UTF-8 text" if isinstance(error, ValueError) else "not valid YAML"
