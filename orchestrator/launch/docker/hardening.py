"""The confinement of a sandbox as it is asked of the Engine. Pure.

`verification` compares it with what the Engine did. The sandbox itself sets up the inside (two identities, no
capability left). `seccomp.json` follows the idea of moby's default profile, narrowed to what CPython needs and to
the native architecture: calls through another one end the thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.launch.docker.uids import UidPair
from orchestrator.launch.names import ATTACHMENTS_DIR, CHANNEL_GID, CHANNEL_MOUNT, WORKSPACE_DIR
from orchestrator.types import Attachment, SandboxSpec

MIB = 1 << 20
PROCESS_BYTES = 192 * MIB  # memory that files cannot take away from the processes
MIN_MEMORY_BYTES = 256 * MIB
MIN_PIDS = 48
SUPERVISOR_PIDS = 24  # reserved for pid 1 and the runner, so that they can always fork
OPEN_FILES = 1024
OOM_SCORE = 500  # if the machine runs out of memory, sandboxes are killed before the orchestrator

_ATTACHMENTS_SHARE = 0.30
_PAGE = 4096
_TMPFS_OPTIONS = "nosuid,nodev,noexec"
_AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_TYPE_MASK = 2, 10, 1, 0xF
# All are named here, as an old Engine's own list lacks some. The fourth line hides facts about the host.
_MASKED_PATHS = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
    *("/proc/cmdline", "/proc/diskstats", "/proc/modules", "/proc/partitions"),
    "/dev/pts",  # pseudo-terminals are counted over the whole machine
)
_READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def sandbox_config(
    spec: SandboxSpec,
    uids: UidPair,
    channel: Path,
    labels: Mapping[str, str],
    *,
    allow_localhost_tcp: bool = False,
) -> dict[str, Any]:
    """The body of the Engine's create call. Raises ConfigError for limits too low for any sandbox."""
    if spec.pids < MIN_PIDS:
        raise ConfigError(f"sandbox_pids is {spec.pids}, a sandbox needs at least {MIN_PIDS}")
    return {
        "Image": spec.image,
        "Cmd": _arguments(spec, uids),
        "User": "0:0",
        "Hostname": "sandbox",
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        # If networking is not disabled, the Engine joins the container to the network "none". It runs itself twice
        # for that, half the CPU of a bare start, and mounts the host's name servers. But it also mounts the file
        # that says what `localhost` is, which local TCP needs.
        "NetworkDisabled": not allow_localhost_tcp,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "Tmpfs": tmpfs_mounts(spec.memory_bytes, uids),
            "Mounts": [{"Type": "bind", "Source": str(channel), "Target": CHANNEL_MOUNT, "ReadOnly": True}],
            "CapDrop": ["ALL"],
            "CapAdd": ["SETGID", "SETUID"],
            "SecurityOpt": [
                "no-new-privileges",
                f"seccomp={seccomp_profile(allow_localhost_tcp=allow_localhost_tcp)}",
            ],
            "Memory": spec.memory_bytes,
            "MemorySwap": spec.memory_bytes,
            "NanoCpus": round(spec.cpus * 1e9),
            "PidsLimit": spec.pids,
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "fsize", "Soft": spec.memory_bytes, "Hard": spec.memory_bytes},
                {"Name": "msgqueue", "Soft": 0, "Hard": 0},  # /dev/mqueue takes files too
                {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
            ],
            "OomScoreAdj": OOM_SCORE,
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "MaskedPaths": list(_MASKED_PATHS),
            "ReadonlyPaths": list(_READ_ONLY_PATHS),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "Init": False,  # our own pid 1 reaps children
            **({"Runtime": spec.runtime} if spec.runtime else {}),
        },
    }


def tmpfs_mounts(memory_bytes: int, uids: UidPair) -> dict[str, str]:
    """All writable places. Their sizes leave PROCESS_BYTES of the memory even if all of them are full.

    Raises ConfigError for less memory than a sandbox needs.
    """
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"sandbox_memory is {memory_bytes // MIB} MiB, a sandbox needs at least {MIN_MEMORY_BYTES // MIB} MiB"
        )

    def mount(share: float, inodes: int, mode: str, uid: int = 0) -> str:
        size = _tmpfs_bytes(memory_bytes, share)
        return f"size={size},nr_inodes={inodes},mode={mode},uid={uid},gid={uid},{_TMPFS_OPTIONS}"

    return {
        WORKSPACE_DIR: mount(0.40, 8192, "0700", uids.worker),
        ATTACHMENTS_DIR: mount(_ATTACHMENTS_SHARE, 2048, "0755", uids.runner),
        "/tmp": mount(0.25, 8192, "1777"),  # noqa: S108
        "/dev/shm": mount(0.05, 512, "1777"),  # noqa: S108
    }


def too_large(attachments: Iterable[Attachment], memory_bytes: int) -> str | None:
    """Why a task's files do not fit into a sandbox of so much memory; None: they fit."""
    needed = sum(-(-attachment.size_bytes // _PAGE) * _PAGE for attachment in attachments)
    room = _tmpfs_bytes(memory_bytes, _ATTACHMENTS_SHARE)
    if needed <= room:
        return None
    return (
        f"its files take {needed} bytes, a sandbox with {memory_bytes // MIB} MiB of memory has room for {room}; "
        "set --env.sandbox_memory higher"
    )


def _tmpfs_bytes(memory_bytes: int, share: float) -> int:
    return int((memory_bytes - PROCESS_BYTES) * share) // _PAGE * _PAGE


@lru_cache
def seccomp_profile(*, allow_localhost_tcp: bool) -> str:
    """The profile as JSON for the Engine.

    `allow_localhost_tcp` allows TCP sockets too, for tasks that start a server of their own. There is still no
    network interface but `lo`.
    """
    profile = json.loads(Path(__file__).with_name("seccomp.json").read_bytes())
    if allow_localhost_tcp:
        profile["syscalls"] += [
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ALLOW",
                "args": [
                    {"index": 0, "value": family, "op": "SCMP_CMP_EQ"},
                    {"index": 1, "value": _SOCK_TYPE_MASK, "valueTwo": _SOCK_STREAM, "op": "SCMP_CMP_MASKED_EQ"},
                ],
            }
            for family in (_AF_INET, _AF_INET6)
        ]
    return json.dumps(profile, separators=(",", ":"))


def _arguments(spec: SandboxSpec, uids: UidPair) -> list[str]:
    """Arguments of `python -m sandbox`. Nothing of the task: all processes in the container can read them."""
    arguments = {
        "channel": CHANNEL_MOUNT,
        "attachments": ATTACHMENTS_DIR,
        "workspace": WORKSPACE_DIR,
        "runner-uid": uids.runner,
        "worker-uid": uids.worker,
        "channel-gid": CHANNEL_GID,
        "worker-processes": spec.pids - SUPERVISOR_PIDS,
    }
    return [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
