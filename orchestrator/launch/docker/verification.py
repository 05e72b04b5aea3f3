"""What the Engine made of our wishes, compared with them before a sandbox is used.

Pure: `docker` asks the Engine and refuses. What pid 1 saw for itself is `confinement`'s part. A measure has
one name in both, and the operator can switch single ones off by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import EnvironmentUnusable

NO_MEASURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Measure:
    """One setting: its name, and what the answer of the Engine's inspect call says about it."""

    name: str
    effective: Callable[[Mapping[str, Any]], object]


def _host(key: str, default: object = None) -> Callable[[Mapping[str, Any]], object]:
    """A field of HostConfig; absent and empty are the same to the Engine."""
    return lambda inspected: inspected["HostConfig"].get(key) or default


def _capabilities(inspected: Mapping[str, Any]) -> object:
    host = inspected["HostConfig"]
    return {
        key: sorted(name.removeprefix("CAP_") for name in host.get(key) or ()) for key in ("CapAdd", "CapDrop")
    }


def _security_option(name: str) -> Callable[[Mapping[str, Any]], object]:
    def effective(inspected: Mapping[str, Any]) -> object:
        for option in inspected["HostConfig"].get("SecurityOpt") or ():
            key, _, value = option.replace(":", "=", 1).partition("=")
            if key == name:
                return value or "true"
        return None

    return effective


def _mounts(inspected: Mapping[str, Any]) -> object:
    return sorted((m["Type"], m["Destination"], m["RW"]) for m in inspected.get("Mounts") or ())


def _network(inspected: Mapping[str, Any]) -> object:
    joined = set(inspected["NetworkSettings"].get("Networks") or ())  # of one that is not to have any: none at all
    return inspected["HostConfig"]["NetworkMode"], sorted(joined - {"none"})


def _ulimits(inspected: Mapping[str, Any]) -> object:
    return sorted((u["Name"], u["Soft"], u["Hard"]) for u in inspected["HostConfig"].get("Ulimits") or ())


def _paths(inspected: Mapping[str, Any]) -> object:
    host = inspected["HostConfig"]
    return {key: sorted(host.get(key) or ()) for key in ("MaskedPaths", "ReadonlyPaths")}


def _devices(inspected: Mapping[str, Any]) -> object:
    host = inspected["HostConfig"]
    return [host.get(key) or [] for key in ("Devices", "DeviceRequests", "DeviceCgroupRules")]


def _namespaces(inspected: Mapping[str, Any]) -> object:
    host = inspected["HostConfig"]
    return {key: host.get(key) or "private" for key in ("PidMode", "UTSMode", "CgroupnsMode", "UsernsMode")}


def _log_limits(inspected: Mapping[str, Any]) -> object:
    log = inspected["HostConfig"]["LogConfig"]
    return log["Type"], log.get("Config")


MEASURES = (
    Measure("network", _network),
    Measure("read_only_root", _host("ReadonlyRootfs", False)),
    Measure("tmpfs", _host("Tmpfs")),
    Measure("mounts", _mounts),
    Measure("privileged", _host("Privileged", False)),
    Measure("capabilities", _capabilities),
    Measure("no_new_privileges", _security_option("no-new-privileges")),
    Measure("seccomp", _security_option("seccomp")),
    Measure("memory", _host("Memory")),
    Measure("swap", _host("MemorySwap")),
    Measure("oom_kill", lambda inspected: not inspected["HostConfig"].get("OomKillDisable")),
    Measure("cpus", _host("NanoCpus")),
    Measure("pids", _host("PidsLimit")),
    Measure("ulimits", _ulimits),
    Measure("ipc", _host("IpcMode")),
    Measure("namespaces", _namespaces),
    Measure("devices", _devices),
    Measure("hidden_paths", _paths),
    Measure("log_limits", _log_limits),
    Measure("user", lambda inspected: inspected["Config"].get("User")),
    Measure("oom_score", _host("OomScoreAdj", 0)),
    Measure("runtime", _host("Runtime")),
)
# Only the sandbox itself can tell.
IDENTITIES = "identities"
MEASURE_NAMES = frozenset(measure.name for measure in MEASURES) | {IDENTITIES}


def verify(
    inspected: Mapping[str, Any], config: Mapping[str, Any], waived: frozenset[str] = NO_MEASURES
) -> list[str]:
    """What of `config` (a create call's body) a container with this inspect answer lacks: a line each."""
    required = _as_inspected(config)
    # Where none is asked for, the Engine's default is what there should be.
    required["HostConfig"] = {"Runtime": inspected["HostConfig"].get("Runtime")} | required["HostConfig"]
    problems = []
    for measure in MEASURES:
        if measure.name not in waived:
            wanted, got = measure.effective(required), measure.effective(inspected)
            if wanted != got:
                problems.append(f"{measure.name} is {_short(got)} instead of {_short(wanted)}")
    return problems


def demand(problems: list[str]) -> None:
    """Raises EnvironmentUnusable unless there are none."""
    if problems:
        raise EnvironmentUnusable(
            f"sandboxes are not confined as they must be here: {'; '.join(problems)}. "
            "Use an Engine that can, or switch these measures off by name: --env.waive_hardening"
        )


def _as_inspected(config: Mapping[str, Any]) -> dict[str, Any]:
    """What inspect says of a container that is exactly as `config` asks."""
    host = config["HostConfig"]
    return {
        "Config": config,
        "HostConfig": host,
        "Mounts": [
            {"Type": m["Type"], "Destination": m["Target"], "RW": not m["ReadOnly"]} for m in host["Mounts"]
        ],
        "NetworkSettings": {},
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"
