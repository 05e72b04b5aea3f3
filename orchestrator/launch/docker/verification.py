"""Compares what the Engine set for a container with what was asked for, before the sandbox is used.

Pure: `launcher` asks the Engine and refuses the sandbox. `confinement` checks what pid 1 saw. Both use the same
names of measures, those of `hardening`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.launch.hardening import NO_MEASURES, TERMINALS_MOUNT


def _host(key: str, default: object = None) -> Callable[[Mapping[str, Any]], object]:
    """Reads a field of HostConfig. To the Engine, absent and empty are the same."""
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


def _terminals(inspected: Mapping[str, Any]) -> object:
    """How their file system is mounted: its options have the limit."""
    mounts = (m for m in inspected["HostConfig"].get("Mounts") or () if m["Target"] == TERMINALS_MOUNT)
    return [m["VolumeOptions"]["DriverConfig"]["Options"] for m in mounts]


def _network(inspected: Mapping[str, Any]) -> object:
    joined = set(inspected["NetworkSettings"].get("Networks") or ())  # empty if networking is disabled
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


# Name of a setting → how to read it from the answer of the Engine's inspect call.
MEASURES: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "network": _network,
    "read_only_root": _host("ReadonlyRootfs", False),
    "tmpfs": _host("Tmpfs"),
    "mounts": _mounts,
    "privileged": _host("Privileged", False),
    "capabilities": _capabilities,
    "no_new_privileges": _security_option("no-new-privileges"),
    "seccomp": _security_option("seccomp"),
    "memory": _host("Memory"),
    "swap": _host("MemorySwap"),
    "oom_kill": lambda inspected: not inspected["HostConfig"].get("OomKillDisable"),
    "cpus": _host("NanoCpus"),
    "pids": _host("PidsLimit"),
    "terminals": _terminals,
    "ulimits": _ulimits,
    "ipc": _host("IpcMode"),
    "namespaces": _namespaces,
    "devices": _devices,
    "hidden_paths": _paths,
    "log_limits": _log_limits,
    "user": lambda inspected: inspected["Config"].get("User"),
    "oom_score": _host("OomScoreAdj", 0),
    "runtime": _host("Runtime"),
}


def verify(
    inspected: Mapping[str, Any], config: Mapping[str, Any], waived: frozenset[str] = NO_MEASURES
) -> list[str]:
    """Settings of `config` (a create call's body) that a container with this inspect answer lacks: a line each."""
    required = _as_inspected(config)
    # If no runtime is asked for, the Engine's default is right.
    required["HostConfig"] = {"Runtime": inspected["HostConfig"].get("Runtime")} | required["HostConfig"]
    problems = []
    for measure, effective in MEASURES.items():
        if measure not in waived and (wanted := effective(required)) != (got := effective(inspected)):
            problems.append(f"{measure} is {_short(got)} instead of {_short(wanted)}")
    return problems


def _as_inspected(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inspect answer of a container that is exactly as `config` asks."""
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
