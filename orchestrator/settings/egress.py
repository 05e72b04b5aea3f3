"""Settings of what leaves sandboxes: docs/world.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.border_keys import KeyEntry, key_entry_of
from orchestrator.rules.egress import Entry, entry_of
from orchestrator.rules.text import path_of
from orchestrator.settings.json_kinds import Json, json_value
from orchestrator.settings.kinds import Flag, Integer, Size, seconds
from orchestrator.settings.row import PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings

REPLAY = "replay:"
OF_TASKS = "task"  # what a task asks for
_MOST = 1_000
_GIBIBYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class Entries(Json):
    """Texts and objects as `read_one` takes them: a JSON list, or texts with commas between them. The value is as
    it would be written. `name`: of the setting, for errors that say what is wrong with one."""

    name: str
    read_one: Callable[[object], Any]
    valid: str
    metavar: str = "HOST,.."

    def read(self, raw: object) -> tuple[Any, ...]:
        if isinstance(raw, str) and not raw.lstrip().startswith(("[", "{")):
            raw = [text.strip() for text in raw.split(",")] if raw.strip() not in ("", "none") else []
        raw = json_value(raw)
        raw = [raw] if isinstance(raw, Mapping) else raw
        if not isinstance(raw, list | tuple) or len(raw) > _MOST:
            raise ValueError
        kept = []
        for one in raw:
            try:
                value = self.read_one(one)
            except ValueError as error:
                raise ConfigError(f"{self.name}: {error}") from None
            kept += [value] if value not in kept else []
        return tuple(kept)


def _egress(raw: object) -> str | dict[str, Any]:
    if isinstance(raw, str) and raw.startswith(REPLAY):
        path_of(raw.removeprefix(REPLAY))
        return raw
    if raw == OF_TASKS:
        return OF_TASKS
    return entry_of(raw).as_setting()


def _key(raw: object) -> KeyEntry | dict[str, str]:
    if isinstance(raw, KeyEntry) and raw.value is not None:  # from another machine, with its key
        return raw
    return key_entry_of(raw).as_setting()


@dataclass(frozen=True, kw_only=True, repr=False)
class EgressSettings(Settings, group="Network of sandboxes", resume=Resume.DATA, commands=(*RUNS, *PLAYS)):
    """What leaves sandboxes, and with which keys."""

    egress: tuple[Any, ...] = row(
        (),
        Entries(
            "env.egress",
            _egress,
            'HOST, *.HOST, HOST:PORT, * (all public hosts), or a JSON list of these and of objects like {"host": '
            '"pypi.org", "ports": [443], "methods": ["GET"], "paths": ["/simple"], "tls": "tunnel", "private": '
            "true}, or task (what each task asks for); or replay:RUN_DIR alone",
        ),
        "hosts that agents' programs may ask, by an HTTP proxy on their loopback device; else nothing leaves. "
        "replay:RUN_DIR: what that run was answered, without a network; docs/world.md",
        resume=Resume.CONFIRM,
        commands=(*RUNS, "branch"),  # `replay` has the record in its place
        from_run=("branch",),
    )
    secrets: tuple[Any, ...] = row(
        (),
        Entries(
            "env.secrets",
            _key,
            'a JSON list of objects like {"host": "api.example.org", "header": "Authorization", "from": '
            '"env:NAME", "format": "Bearer {}"}; with "query" in place of "header", "file:PATH" of "env:NAME"',
            "JSON",
        ),
        "keys that are put into requests to hosts of env.egress, outside of the sandbox",
        resume=Resume.CONFIRM,
        commands=RUNS,
    )
    egress_cache: bool = row(
        False,
        Flag(),
        "package files that one rollout has downloaded are given to the others of the run without asking again",
        resume=Resume.FREE_DATA,
    )
    max_egress_requests: int = row(
        10_000, Integer(1, 100_000), "requests and tunnels of one rollout", from_run=PLAYS
    )
    max_egress_bytes: int = row(
        2 * _GIBIBYTE, Size(64 * 1024), "bytes that these send and receive", resume=Resume.SIZE, from_run=PLAYS
    )
    max_egress_streams: int = row(128, Integer(1, 10_000), "connections of one rollout at a time", from_run=PLAYS)
    egress_timeout: float = row(600.0, seconds(above=0), "one request, or one tunnel", from_run=PLAYS)
    egress_kept: int = row(
        10 * _GIBIBYTE,
        Size(0),
        "bodies of requests and answers that the run directory keeps; those over it cannot be replayed",
        resume=Resume.FREE_DATA,
    )

    @property
    def egress_entries(self) -> tuple[Entry, ...]:
        """The hosts."""
        return tuple(entry_of(raw) for raw in self.egress if raw != OF_TASKS and not _is_replay(raw))

    @property
    def gives_tasks_theirs(self) -> bool:
        """Whether rollouts may ask the hosts that their task names."""
        return OF_TASKS in self.egress

    @property
    def egress_replay(self) -> Path | None:
        """The run whose record answers in the place of a network."""
        return next((path_of(raw.removeprefix(REPLAY)) for raw in self.egress if _is_replay(raw)), None)

    @property
    def key_entries(self) -> tuple[KeyEntry, ...]:
        """The keys, not read yet."""
        return tuple(key_entry_of(raw) for raw in self.secrets)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.egress_replay is not None and len(self.egress) > 1:
            raise ConfigError("env.egress: replay:RUN_DIR stands alone: what is not on record is refused")
        for key in self.key_entries:
            exact = [entry for entry in self.egress_entries if entry.host == key.host and entry.tls == "terminate"]
            if not exact and self.egress_replay is None:
                raise ConfigError(
                    f"env.secrets: {key.host} must be in env.egress, by name and without tls: tunnel"
                )


def _is_replay(raw: object) -> bool:
    return isinstance(raw, str) and raw.startswith(REPLAY)
