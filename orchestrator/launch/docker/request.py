"""The confinement of a sandbox as it is asked of the Engine. Pure. `verification` compares it with what the Engine
did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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
from orchestrator.launch.names import CHANNEL_MOUNT, is_gvisor
from orchestrator.types import SandboxSpec


def create_body(
    spec: SandboxSpec, hardening: Hardening, labels: Mapping[str, str], waived: frozenset[str] = NO_MEASURES
) -> dict[str, Any]:
    """The body of the Engine's create call."""
    local_tcp = hardening.allow_localhost_tcp
    # gVisor keeps terminals of its own, which do not count on the machine.
    own_terminals = "terminals" in waived or (spec.runtime is not None and is_gvisor(spec.runtime))
    return {
        "Image": spec.image,
        "Cmd": list(hardening.arguments),
        "User": "0:0",
        "Hostname": HOST_NAME,
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        # If networking is not disabled, the Engine joins the container to the network "none". It runs itself twice
        # for that, half the CPU of a bare start, and mounts the host's name servers. But it also mounts the file
        # that says what `localhost` is, which local TCP needs.
        "NetworkDisabled": not local_tcp,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "Tmpfs": {place.target: ",".join(place.options) for place in hardening.tmpfs},
            "Mounts": [
                {"Type": "bind", "Source": str(hardening.channel), "Target": CHANNEL_MOUNT, "ReadOnly": True},
                *([] if own_terminals else [_terminals()]),
            ],
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges", f"seccomp={_profile_text(allow_localhost_tcp=local_tcp)}"],
            "Memory": hardening.memory_bytes,
            "MemorySwap": hardening.memory_bytes,
            "NanoCpus": round(hardening.cpus * 1e9),
            "PidsLimit": hardening.pids,
            "Ulimits": [{"Name": name, "Soft": most, "Hard": most} for name, most in hardening.ulimits.items()],
            "OomScoreAdj": OOM_SCORE,
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "MaskedPaths": list(MASKED_PATHS),
            "ReadonlyPaths": list(READ_ONLY_PATHS),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "Init": False,  # our own pid 1 reaps children
            **({"Runtime": spec.runtime} if spec.runtime else {}),
        },
    }


def _terminals() -> dict[str, Any]:
    """A file system of pseudo-terminals with a limit, as a volume that is removed with the container. That which
    the Engine mounts by itself has no limit."""
    how = {"type": "devpts", "device": "devpts", "o": ",".join(TERMINALS_OPTIONS)}
    driver = {"NoCopy": True, "DriverConfig": {"Name": "local", "Options": how}}
    return {"Type": "volume", "Target": TERMINALS_MOUNT, "ReadOnly": False, "VolumeOptions": driver}


@lru_cache
def _profile_text(*, allow_localhost_tcp: bool) -> str:
    return json.dumps(seccomp_profile(allow_localhost_tcp=allow_localhost_tcp), separators=(",", ":"))
