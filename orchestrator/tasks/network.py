"""The hosts that a task asks for: its row's `network`, as Harbor's task.toml says it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.rules.egress import ANY, entry_of
from orchestrator.tasks.base import BadRow
from orchestrator.tasks.cells import kind_of, plain

_MODES = ("no-network", "allowlist", "public")
_MOST = 256


def network_of(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """`network` of a Task, from the row's column of that name. Raises BadRow."""
    value = plain(row.get("network"))
    if value in (None, ""):
        return ()
    if isinstance(value, str):
        value = {"mode": value}
    if not isinstance(value, Mapping):
        raise BadRow(f"network must be an object, not {kind_of(value)}")
    if unknown := [str(name) for name in value if name not in ("mode", "allowed_hosts")]:
        raise BadRow(f"network has the unknown {ascii(unknown[0])[:60]}; there are mode and allowed_hosts")
    hosts = plain(value.get("allowed_hosts"))
    mode = plain(value.get("mode")) or ("no-network" if hosts is None else "allowlist")
    if mode not in _MODES:
        raise BadRow(f"network has the mode {ascii(mode)[:60]}; valid are {', '.join(_MODES)}")
    if hosts is not None and not isinstance(hosts, list | tuple):
        raise BadRow(f"allowed_hosts must be a list of texts, not {kind_of(hosts)}")
    return hosts_of(mode, hosts or ())


def hosts_of(mode: str, allowed: Sequence[object]) -> tuple[str, ...]:
    """The hosts, as `env.egress` has them; `*`: every public one. Raises BadRow."""
    if mode != "allowlist":
        return (ANY,) if mode == "public" else ()
    return demand_hosts(allowed)


def demand_hosts(hosts: Sequence[object]) -> tuple[str, ...]:
    """The hosts of a list that may be anything. Raises BadRow."""
    if len(hosts) > _MOST:
        raise BadRow(f"allowed_hosts has {len(hosts)} entries, at most {_MOST} are allowed")
    for host in hosts:
        if not isinstance(host, str):
            raise BadRow(f"allowed_hosts must be a list of texts, not of {kind_of(host)}")
        try:
            entry_of(host)
        except ValueError as error:
            raise BadRow(f"allowed_hosts: {error}") from None
    return tuple(str(host) for host in hosts)
