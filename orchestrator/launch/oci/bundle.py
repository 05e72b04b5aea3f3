"""The confinement of a sandbox as it is asked of an OCI runtime: the `config.json` of its bundle. Pure.

`verification` compares it with what the runtime and the kernel did. The format is that of the OCI runtime
specification, `config.md` and `config-linux.md`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.launch.contents import ENVIRONMENT, Contents
from orchestrator.launch.hardening import (
    CAPABILITIES,
    HOST_NAME,
    MASKED_PATHS,
    NO_MEASURES,
    OOM_SCORE,
    READ_ONLY_PATHS,
    TERMINALS_MOUNT,
    TERMINALS_OPTIONS,
    Hardening,
    seccomp_profile,
)
from orchestrator.launch.names import CHANNEL_MOUNT, RUNTIME_MOUNT

NAMESPACES = ("cgroup", "ipc", "mount", "network", "pid", "uts")
CPU_PERIOD_US = 100_000
_CLOSED = ("nosuid", "nodev", "noexec")
_SYSCTL = {"net.ipv4.ip_unprivileged_port_start": "0"}  # any port can be served at, as in Docker's containers
_DEV_BYTES = 65_536  # it holds links and devices; only root could write there


def bundle(
    root: Path,
    contents: Contents,
    hardening: Hardening,
    control_group: str,
    *,
    unlimited: frozenset[str] = NO_MEASURES,
) -> dict[str, Any]:
    """The bundle's configuration. `root`: the folder of its files. `control_group`: its path, or its name beside
    that of the runtime's own process. `unlimited`: measures that nothing here can enforce and that the operator
    has waived; a runtime that is asked for them, or for a control group of that name, would refuse."""
    capabilities = [f"CAP_{name}" for name in CAPABILITIES]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": hardening.root is None},
        "hostname": HOST_NAME,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [*contents.command, *hardening.arguments],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [
                {"type": f"RLIMIT_{name.upper()}", "soft": most, "hard": most}
                for name, most in hardening.ulimits.items()
            ],
            "noNewPrivileges": True,
            "oomScoreAdj": OOM_SCORE,
        },
        "mounts": _mounts(contents, hardening),
        "linux": {
            "namespaces": [{"type": name} for name in NAMESPACES],
            **({} if unlimited else {"cgroupsPath": control_group}),
            **({"sysctl": _SYSCTL} if hardening.root is not None or hardening.allow_localhost_tcp else {}),
            "resources": _resources(hardening, unlimited),
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READ_ONLY_PATHS),
            "seccomp": _seccomp(hardening),
        },
    }


def _mounts(contents: Contents, hardening: Hardening) -> list[dict[str, Any]]:
    """Without mqueue, which Docker mounts too: nothing here needs a message queue."""

    def mount(target: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": kind, "options": list(options)}

    return [
        mount("/proc", "proc", *_CLOSED),
        mount("/dev", "tmpfs", "nosuid", "noexec", "strictatime", "mode=755", f"size={_DEV_BYTES}"),
        mount(TERMINALS_MOUNT, "devpts", *TERMINALS_OPTIONS),
        mount("/sys", "sysfs", *_CLOSED, "ro"),
        mount("/sys/fs/cgroup", "cgroup", *_CLOSED, "relatime", "ro"),
        *(mount(place.target, "tmpfs", *place.options) for place in hardening.tmpfs),
        {**mount(CHANNEL_MOUNT, "bind", "bind", "ro", *_CLOSED), "source": str(hardening.channel)},
        {**mount(RUNTIME_MOUNT, "bind", "bind", "ro", "nosuid", "nodev"), "source": contents.runtime},
    ]


def _resources(hardening: Hardening, unlimited: frozenset[str]) -> dict[str, Any]:
    memory = {"limit": hardening.memory_bytes, "swap": hardening.memory_bytes}
    if "swap" in unlimited:
        del memory["swap"]
    resources: dict[str, tuple[str, dict[str, Any]]] = {
        "memory": ("memory", memory),
        "cpus": ("cpu", {"period": CPU_PERIOD_US, "quota": round(hardening.cpus * CPU_PERIOD_US)}),
        "pids": ("pids", {"limit": hardening.pids}),
    }
    limits = {part: limit for measure, (part, limit) in resources.items() if measure not in unlimited}
    return {**limits, "devices": [{"allow": False, "access": "rwm"}]}


def _seccomp(hardening: Hardening) -> dict[str, Any]:
    """Without architectures: then the filter knows the native one alone."""
    profile: Mapping[str, Any] = seccomp_profile(
        allow_localhost_tcp=hardening.allow_localhost_tcp,
        writable_root=hardening.root is not None,
        shared_memory=hardening.shared_memory,
    )
    rules = [{key: value for key, value in rule.items() if key != "comment"} for rule in profile["syscalls"]]
    return {**profile, "syscalls": rules}
