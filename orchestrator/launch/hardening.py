"""What confines a sandbox, stated once. Pure.

`docker/request` says it to the Engine; the launcher checks what became of it, and `confinement` compares it with
what pid 1 sees. The sandbox itself sets up the inside (two identities, no capability left). `seccomp.json` follows
the idea of moby's default profile, narrowed to what CPython needs and to the native architecture: calls through
another one end the thread.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.launch.names import ATTACHMENTS_DIR, CHANNEL_FOLDER, CHANNEL_GID, CHANNEL_MOUNT, WORKSPACE_DIR
from orchestrator.launch.uids import UidPair
from orchestrator.types import MIN_MEMORY_BYTES, Attachment, SandboxSpec

MIB = 1 << 20
PROCESS_BYTES = 192 * MIB  # memory that files cannot take away from the processes
MIN_PIDS = 48
SUPERVISOR_PIDS = 24  # reserved for pid 1 and the runner, so that they can always fork
OPEN_FILES = 1024
OOM_SCORE = 500  # if the machine runs out of memory, sandboxes are killed before the orchestrator
TERMINALS = 8  # pseudo-terminals, which are counted over the whole machine: Linux has 3,072 for all containers
TERMINALS_MOUNT = "/dev/pts"
TERMINALS_OPTIONS = ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={TERMINALS}")
HOST_NAME = "sandbox"
CAPABILITIES = ("SETGID", "SETUID")
# All are named here, as an old Engine's own list lacks some. The fourth line hides facts about the host.
MASKED_PATHS = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/key-users", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
    *("/proc/cmdline", "/proc/diskstats", "/proc/modules", "/proc/partitions"),
)
READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# The names by which the operator can waive single measures.
NO_MEASURES: frozenset[str] = frozenset()
IDENTITIES = "identities"  # only the sandbox itself can check it
ID_RANGES = "id_ranges"  # of agents that may be root inside; asked before anything starts
MEASURE_NAMES = frozenset(
    {
        *(
            "network",
            "read_only_root",
            "root_size",
            "tmpfs",
            "mounts",
            "privileged",
            "capabilities",
            "no_new_privileges",
        ),
        *("seccomp", "memory", "swap", "oom_kill", "cpus", "pids", "ulimits", "ipc", "namespaces", "devices"),
        *("hidden_paths", "log_limits", "user", "oom_score", "runtime", "terminals", IDENTITIES, ID_RANGES),
    }
)

_ATTACHMENTS_SHARE = 0.30
_PAGE = 4096
_AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM, _SOCK_DGRAM, _SOCK_TYPE_MASK = 2, 10, 16, 1, 2, 0xF
_CLONE_NEWUSER, _EAFNOSUPPORT = 0x10000000, 97


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """A place in memory, of the user `uid` and the group `gid`; never for devices, set-uid files and programs."""

    target: str
    size_bytes: int
    inodes: int
    mode: int
    uid: int
    gid: int

    @property
    def options(self) -> tuple[str, ...]:
        """As `mount -o` takes them."""
        return (
            f"size={self.size_bytes}",
            f"nr_inodes={self.inodes}",
            f"mode={self.mode:04o}",
            f"uid={self.uid}",
            f"gid={self.gid}",
            *("nosuid", "nodev", "noexec"),
        )


# The socket's folder is mounted in it: only the runner has the group, so model-written code cannot get there.
CHANNEL_PLACE = Tmpfs(CHANNEL_FOLDER, 4 * 4096, inodes=8, mode=0o710, uid=0, gid=CHANNEL_GID)


@dataclass(frozen=True, slots=True)
class RootBounds:
    """What may be written to a root file system. `on_disk`: not in memory, where it would not fit."""

    size_bytes: int
    inodes: int
    on_disk: bool


@dataclass(frozen=True, slots=True)
class Hardening:
    """All that confines one sandbox, and the arguments of its program.

    `root`: how much may be written to the root; None: it is read-only. `worker_processes`: most of the worker's.

    Beside it hold for every sandbox: CAPABILITIES and no others, no new privileges, OOM_SCORE,
    MASKED_PATHS, READ_ONLY_PATHS, own namespaces of all kinds, no network but `lo`, no device but the usual ones
    and TERMINALS of its own.
    `memory_bytes` is with swap. `ulimits`: hard and soft. `shared_memory`: System V's, of its own IPC namespace
    and its own memory limit; databases need it.
    """

    arguments: tuple[str, ...]
    channel: Path
    tmpfs: tuple[Tmpfs, ...]
    memory_bytes: int
    cpus: float
    pids: int
    ulimits: Mapping[str, int]
    allow_localhost_tcp: bool
    root: RootBounds | None
    worker_processes: int
    shared_memory: bool = False


def harden(spec: SandboxSpec, uids: UidPair, channel: Path, *, allow_localhost_tcp: bool = False) -> Hardening:
    """The confinement of a sandbox of `spec` whose sockets are in `channel`. `allow_localhost_tcp`: its seccomp
    profile lets it open TCP sockets. Raises ConfigError for limits too low for any sandbox."""
    if spec.pids < MIN_PIDS:
        raise ConfigError(f"sandbox_pids is {spec.pids}, a sandbox needs at least {MIN_PIDS}")
    root = RootBounds(spec.storage_bytes, spec.storage_inodes, spec.is_on_disk) if spec.is_writable else None
    return Hardening(
        arguments=_arguments(spec, uids),
        channel=channel,
        tmpfs=(*writable_places(spec.memory_bytes, uids, writable_root=spec.is_writable), CHANNEL_PLACE),
        memory_bytes=spec.memory_limit_bytes,
        cpus=spec.cpus,
        pids=spec.pids,
        ulimits={
            "core": 0,
            "fsize": max(spec.memory_bytes, spec.storage_bytes),
            "msgqueue": 0,  # /dev/mqueue takes files too
            "nofile": OPEN_FILES,
        },
        allow_localhost_tcp=allow_localhost_tcp,
        root=root,
        worker_processes=spec.pids - SUPERVISOR_PIDS,
    )


def writable_places(memory_bytes: int, uids: UidPair, *, writable_root: bool = False) -> tuple[Tmpfs, ...]:
    """All of them but the root. Their sizes leave PROCESS_BYTES of the memory even if all of them are full.

    Raises ConfigError for less memory than a sandbox needs.
    """
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"sandbox_memory is {memory_bytes // MIB} MiB, a sandbox needs at least {MIN_MEMORY_BYTES // MIB} MiB"
        )

    def place(target: str, share: float, inodes: int, mode: int, uid: int = 0) -> Tmpfs:
        return Tmpfs(target, _tmpfs_bytes(memory_bytes, share), inodes, mode, uid, gid=uid)

    on_a_read_only_root = (
        place(WORKSPACE_DIR, 0.40, 8192, 0o700, uids.worker),
        place("/tmp", 0.25, 8192, 0o1777),  # noqa: S108
    )
    return (
        *(() if writable_root else on_a_read_only_root),
        place(ATTACHMENTS_DIR, _ATTACHMENTS_SHARE, 2048, 0o755, uids.runner),
        place("/dev/shm", 0.05, 512, 0o1777),  # noqa: S108
    )


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


@lru_cache
def seccomp_profile(
    *, allow_localhost_tcp: bool, writable_root: bool = False, shared_memory: bool = False
) -> dict[str, Any]:
    """`defaultAction`, `defaultErrnoRet`, `syscalls`: what the Engine's form and the OCI's have in common. Callers
    must not change it.

    `allow_localhost_tcp` allows TCP sockets too, for tasks that start a server of their own. There is still no
    network interface but `lo`. `writable_root`: for an agent that may be root inside. It has TCP and UDP. Pid 1
    may join a user namespace, which its children refuse themselves when they have entered theirs.
    """
    profile: dict[str, Any] = json.loads(Path(__file__).with_name("seccomp.json").read_bytes())
    kinds = (_SOCK_STREAM, _SOCK_DGRAM) if writable_root else (_SOCK_STREAM,) if allow_localhost_tcp else ()
    profile["syscalls"] += [
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ALLOW",
            "args": [
                {"index": 0, "value": family, "op": "SCMP_CMP_EQ"},
                {"index": 1, "value": _SOCK_TYPE_MASK, "valueTwo": kind, "op": "SCMP_CMP_MASKED_EQ"},
            ],
        }
        for family in (_AF_INET, _AF_INET6)
        for kind in kinds
    ]
    if shared_memory:
        profile["syscalls"] += [{"names": ["shmat", "shmctl", "shmdt", "shmget"], "action": "SCMP_ACT_ALLOW"}]
    if writable_root:
        joined = {"index": 1, "value": _CLONE_NEWUSER, "op": "SCMP_CMP_EQ"}
        # What programs expect of a kernel without it; after EPERM, useradd gives up.
        netlink = {"index": 0, "value": _AF_NETLINK, "op": "SCMP_CMP_EQ"}
        profile["syscalls"] += [
            {"names": ["setns"], "action": "SCMP_ACT_ALLOW", "args": [joined]},
            {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": _EAFNOSUPPORT, "args": [netlink]},
        ]
    return profile


def demand(problems: list[str]) -> None:
    """Raises EnvironmentUnusable if there are any: lines that begin with the name of a measure."""
    if problems:
        raise EnvironmentUnusable(
            f"sandboxes are not confined as they must be here: {'; '.join(problems)}. "
            "Use an Engine that can, or switch these measures off by name: --env.waive_hardening"
        )


def _tmpfs_bytes(memory_bytes: int, share: float) -> int:
    return int((memory_bytes - PROCESS_BYTES) * share) // _PAGE * _PAGE


def preload_arguments(spec: SandboxSpec) -> tuple[str, ...]:
    """What `python -m sandbox` is told to import ahead."""
    return tuple(text for module in spec.preload for text in ("--preload", module))


def _arguments(spec: SandboxSpec, uids: UidPair) -> tuple[str, ...]:
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
    return (
        *(text for name, value in arguments.items() for text in (f"--{name}", str(value))),
        *preload_arguments(spec),
    )
