"""Our settings as Atropos' pydantic models, and back.

`orchestrator serve` has a Config; Atropos users hand over a BaseEnvConfig and APIServerConfigs. The table in
`orchestrator.settings.table` stays the only place where a setting is described and checked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from pydantic import Field, create_model

from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.sources import load_config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import ServerType

_ENV_ROWS = EnvSettings.rows()
_OWN_TYPES = {"tokenizer_name": str | None, "max_num_workers": int}


def _plain(value: object) -> Any:
    """The value as pydantic and JSON take it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, row in _ENV_ROWS.items():
        known = BaseEnvConfig.model_fields.get(name)
        kind = _OWN_TYPES.get(name, known.annotation if known is not None else Any)
        fields[name] = (kind, Field(default=_plain(row.default), validate_default=True, description=row.text))
        for alias in row.aliases:
            fields[alias] = (Any, Field(default=None, description=f"the same as {name}"))
    return fields


# Atropos' fields keep their types and get our defaults. Our own fields are Any: the table checks them.
OrchestratorEnvConfig = create_model("OrchestratorEnvConfig", __base__=BaseEnvConfig, **_fields())


class OrchestratorServerConfig(APIServerConfig):  # type: ignore[misc]
    """One endpoint; with `auto` it is asked which server it is."""

    server_type: ServerType = "auto"
    health_check: bool = False
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


def as_env_config(env: EnvSettings, tokenizer_name: str) -> Any:
    """The config for BaseEnv, without `data_path_to_save_groups`: BaseEnv's constructor would open that file."""
    values = {name: _plain(getattr(env, name)) for name in _ENV_ROWS}
    values |= {"tokenizer_name": tokenizer_name, "data_path_to_save_groups": None}
    return OrchestratorEnvConfig(**values)


def as_server_configs(servers: Sequence[OpenAISettings]) -> list[Any]:
    """The servers for BaseEnv, which never samples: without keys, so that nothing can print them."""
    return [
        OrchestratorServerConfig(base_url=server.base_url, model_name=server.model_name, api_key="")
        for server in servers
    ]


def as_config(env_config: Any, server_configs: Any) -> Config:
    """The Config for what an Atropos user handed over, checked by our table. Of environment variables and .env
    only keys are used. Raises ConfigError."""
    servers = server_configs if isinstance(server_configs, Sequence) else [server_configs]
    return load_config(env=_env(env_config), openai=[_server(server) for server in servers])


def _env(env_config: Any) -> dict[str, Any]:
    told: Mapping[str, Any] = env_config.model_dump(mode="json")
    aliases = {alias for row in _ENV_ROWS.values() for alias in row.aliases}
    values = {name: value for name, value in told.items() if name in _ENV_ROWS or name in aliases}
    given = env_config.model_fields_set
    if not isinstance(env_config, OrchestratorEnvConfig):
        # A plain BaseEnvConfig: what was not given has our default, not Atropos'.
        values = {name: value for name, value in values.items() if name in given}
    for row in _ENV_ROWS.values():
        for alias in row.aliases:
            if values.get(alias) is None:
                values.pop(alias, None)
            elif row.name not in given:
                values.pop(row.name, None)
    return {name: value for name, value in values.items() if value is not None or name in given}


def _server(server: Any) -> dict[str, Any]:
    rows = OpenAISettings.rows()
    told = server.model_dump(mode="json")
    given = server.model_fields_set
    values = {name: value for name, value in told.items() if name in rows and name in given}
    if isinstance(values.get("api_key"), Secret):
        values["api_key"] = values["api_key"].reveal()
    return {name: value for name, value in values.items() if value is not None}
