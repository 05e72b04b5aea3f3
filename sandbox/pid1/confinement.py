"""What pid 1 sees of its own limits: read once, before pid 1 forks. The orchestrator decides what must hold."""

import os
import re
import resource
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.procfs import status_of
from sandbox.types import Identities

MAX_MOUNTS = 200  # mounts, or devices, to report; a sandbox has some forty

# Places that show the machine, or through which a sandbox could use up what all sandboxes share.
_READABLE = (
    *("/proc/acpi", "/proc/cmdline", "/proc/diskstats", "/proc/interrupts", "/proc/kcore"),
    *(
        "/proc/key-users",
        "/proc/keys",
        "/proc/modules",
        "/proc/partitions",
        "/proc/sched_debug",
        "/proc/timer_list",
    ),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
)
_WRITABLE = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity")
_ULIMITS = ("core", "fsize", "msgqueue", "nofile")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62  # control groups v1 write a larger number for no limit


def confinement(identities: Identities | None = None) -> pb.Confinement:
    """The limits the calling process runs under, and the users of its children."""
    status = status_of("self")
    interfaces = _lines("/proc/net/dev")[2:]  # two lines of headings
    return pb.Confinement(
        capability_bounding_set=int(status.get("CapBnd", "0"), 16),
        no_new_privileges=status.get("NoNewPrivs") == "1",
        seccomp_mode=int(status.get("Seccomp", "0")),
        network_interfaces=[line.partition(":")[0].strip() for line in interfaces],
        root_read_only=bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        runner_uid=identities.runner_uid if identities else 0,
        worker_uid=identities.worker_uid if identities else 0,
        process_id=os.getpid(),
        own_control_groups=all(line.endswith(":/") for line in _lines("/proc/self/cgroup")),
        mounts=islice(_mounts(), MAX_MOUNTS),
        limits=[pb.Limit(name=name, value=value) for name, value in _limits().items()],
        devices=sorted(os.listdir("/dev"))[:MAX_MOUNTS],
        exposed_paths=[path for path in (*_READABLE, *_WRITABLE) if _exposed(path)],
    )


def _mounts() -> Iterator[pb.Mount]:
    for line in _lines("/proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields, kind = mount.split(), file_system.split()[0]
        target = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        options = fields[5].split(",")
        # The root that a sandbox may write to has the capacity of the file system that takes what is written.
        size_bytes, inodes = _capacity(target) if kind == "tmpfs" or target == "/" else (0, 0)
        yield pb.Mount(
            target=target,
            type=kind,
            read_only="ro" in options,
            no_suid="nosuid" in options,
            no_dev="nodev" in options,
            no_exec="noexec" in options,
            size_bytes=size_bytes,
            inodes=inodes,
        )


def _capacity(target: str) -> tuple[int, int]:
    """(bytes, inodes) of a file system."""
    try:
        total = os.statvfs(target)
    except OSError:  # another user's mount, outside of containers
        return 0, 0
    return total.f_blocks * total.f_frsize, total.f_files


def _limits() -> dict[str, int]:
    """Those that there are."""
    memory = _number("memory.max", "memory/memory.limit_in_bytes")
    swap = _number("memory.swap.max")
    both = memory + swap if memory is not None and swap is not None else None
    all_limits = {
        "memory": memory,
        "memory_and_swap": both if both is not None else _number("memory/memory.memsw.limit_in_bytes"),
        "cpu_millis": cpu_millis(),
        "pids": _number("pids.max", "pids/pids.max"),
        "terminals": _terminals(),
    }
    for name in _ULIMITS:
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        all_limits[name] = None if hard == resource.RLIM_INFINITY else hard
    return {name: value for name, value in all_limits.items() if value is not None}


def _terminals() -> int | None:
    """How many pseudo-terminals may be open; None: no limit of its own."""
    options = ["max=0"]  # none without their file system
    for line in _lines("/proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        if mount.split()[4] == "/dev/pts":
            options = file_system.split()[2].split(",") if file_system.startswith("devpts ") else ["max=0"]
    most = [option.removeprefix("max=") for option in options if option.startswith("max=")]
    return int(most[0]) if most and most[0].isdecimal() else None


def cpu_millis() -> int | None:
    """Thousandths of a CPU that this container may use; None: no limit."""
    words = " ".join(_lines(_CGROUPS / "cpu.max")).split()
    if not words:
        words = [*_lines(_CGROUPS / "cpu/cpu.cfs_quota_us"), *_lines(_CGROUPS / "cpu/cpu.cfs_period_us")]
    if len(words) != 2 or not words[0].isdecimal() or not words[1].isdecimal():
        return None  # `max` or -1: no limit
    return int(words[0]) * 1000 // max(1, int(words[1]))


def _number(*names: str) -> int | None:
    """From the first of these control group files that exists; None: no file, or no limit."""
    for name in names:
        for line in _lines(_CGROUPS / name):
            return int(line) if line.isdecimal() and int(line) < _UNLIMITED else None
    return None


def _exposed(path: str) -> bool:
    if path in _WRITABLE:
        return os.access(path, os.W_OK)
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        with open(path, "rb", buffering=0) as file:
            return bool(file.read(1))
    except OSError:
        return False


def _lines(path: str | Path) -> list[str]:
    """The file's lines; none where it cannot be read."""
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
