"""Compares what the Engine set for a container with what was asked for, before the sandbox is used.

Pure: `launcher` asks the Engine and refuses the sandbox. `confinement` checks what pid 1 saw. Both use the same
names of measures, those of `hardening`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.launch.hardening import NO_MEASURES, TERMINALS_MOUNT
from orchestrator.launch.names import RUNTIME_MOUNT

Inspected = Mapping[str, Any]  # the answer of the Engine's inspect call


def _host(*keys: str, default: object = None) -> Callable[[Inspected], object]:
    """Reads fields of HostConfig. To the Engine, absent and empty are the same, and no list has an order."""

    def read(inspected: Inspected) -> object:
        values = [_plain(inspected["HostConfig"].get(key)) or default for key in keys]
        return values[0] if len(keys) == 1 else dict(zip(keys, values, strict=True))

    return read


def _plain(value: object) -> object:
    """Newer Engines write CAP_ before the names of capabilities. Objects in a list are compared field by field."""
    if not isinstance(value, list):
        return value
    return sorted(str(sorted(x.items())) if isinstance(x, dict) else str(x).removeprefix("CAP_") for x in value)


def _security_option(name: str) -> Callable[[Inspected], object]:
    def read(inspected: Inspected) -> object:
        for option in inspected["HostConfig"].get("SecurityOpt") or ():
            key, _, value = option.replace(":", "=", 1).partition("=")
            if key == name:
                return value or "true"
        return None

    return read


def _terminals(inspected: Inspected) -> object:
    """How their file system is mounted: its options have the limit."""
    mounts = (m for m in inspected["HostConfig"].get("Mounts") or () if m["Target"] == TERMINALS_MOUNT)
    return [m["VolumeOptions"]["DriverConfig"]["Options"] for m in mounts]


def _network(inspected: Inspected) -> object:
    joined = set(inspected["NetworkSettings"].get("Networks") or ())  # empty if networking is disabled
    return inspected["HostConfig"]["NetworkMode"], sorted(joined - {"none"})


# Name of a measure → how to read it.
MEASURES: dict[str, Callable[[Inspected], object]] = {
    "network": _network,
    "read_only_root": _host("ReadonlyRootfs", default=False),
    "tmpfs": _host("Tmpfs"),
    "mounts": lambda answer: sorted(
        # Of volumes the name, but for that of the terminals, which the Engine chose.
        (m["Type"], m["Destination"], m["RW"], m.get("Name") if m["Destination"] == RUNTIME_MOUNT else None)
        for m in answer.get("Mounts") or ()
    ),
    "privileged": _host("Privileged", default=False),
    "capabilities": _host("CapAdd", "CapDrop"),
    "no_new_privileges": _security_option("no-new-privileges"),
    "seccomp": _security_option("seccomp"),
    "memory": _host("Memory"),
    "swap": _host("MemorySwap"),
    "oom_kill": _host("OomKillDisable", default=False),
    "cpus": _host("NanoCpus"),
    "pids": _host("PidsLimit"),
    "terminals": _terminals,
    "ulimits": _host("Ulimits"),
    "ipc": _host("IpcMode"),
    "namespaces": _host("PidMode", "UTSMode", "CgroupnsMode", "UsernsMode", default="private"),
    "devices": _host("Devices", "DeviceRequests", "DeviceCgroupRules"),
    "hidden_paths": _host("MaskedPaths", "ReadonlyPaths"),
    "log_limits": lambda answer: [answer["HostConfig"]["LogConfig"].get(key) for key in ("Type", "Config")],
    "user": lambda answer: answer["Config"].get("User"),
    "oom_score": _host("OomScoreAdj", default=0),
    "runtime": _host("Runtime"),
}


def verify(inspected: Inspected, config: Mapping[str, Any], waived: frozenset[str] = NO_MEASURES) -> list[str]:
    """Settings of `config` (a create call's body) that a container with this inspect answer lacks: a line each."""
    host = config["HostConfig"]
    required = {
        "Config": config,
        # If no runtime is asked for, the Engine's default is right.
        "HostConfig": {"Runtime": inspected["HostConfig"].get("Runtime"), **host},
        "Mounts": [
            {"Type": m["Type"], "Destination": m["Target"], "RW": not m["ReadOnly"], "Name": m.get("Source")}
            for m in host["Mounts"]
        ],
        "NetworkSettings": {},
    }
    problems = []
    for measure, effective in MEASURES.items():
        if measure not in waived and (wanted := effective(required)) != (actual := effective(inspected)):
            problems.append(f"{measure} is {_short(actual)} instead of {_short(wanted)}")
    return problems


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"
