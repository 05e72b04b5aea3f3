"""Compares what pid 1 of a sandbox read in /proc with what was asked for, before the sandbox is used.

This is the second check, independent of the launcher's own from outside: an Engine may report a setting that its
runtime or kernel did not carry out. Pid 1 reports before any model-written code runs. Pure.
"""

from collections.abc import Collection, Iterable, Iterator
from math import ceil
from pathlib import Path

from orchestrator.launch.hardening import (
    IDENTITIES,
    MASKED_PATHS,
    NO_MEASURES,
    READ_ONLY_PATHS,
    TERMINALS,
    TERMINALS_MOUNT,
    Hardening,
    RootBounds,
    Tmpfs,
    harden,
)
from orchestrator.launch.names import CHANNEL_MOUNT, RUNTIME_MOUNT, is_gvisor
from orchestrator.launch.uids import FIRST_UID, LAST_UID, UidPair
from orchestrator.types import Confinement, SandboxSpec

_CAP_SETGID, _CAP_SETUID = 6, 7
_ALLOWED_CAPABILITIES = 1 << _CAP_SETGID | 1 << _CAP_SETUID
_SECCOMP_FILTER = 2
_DEVICES = frozenset(
    {
        *("core", "fd", "full", "null", "random", "stderr", "stdin", "stdout", "tty", "urandom", "zero"),
        *("mqueue", "ptmx", "pts", "shm"),  # file systems, and the device that belongs to one of them
    }
)
_UNTOLD_BY_GVISOR = frozenset(
    {
        *("no_new_privileges", "seccomp", "read_only_root", "tmpfs", "hidden_paths", "devices"),
        *("memory", "swap", "cpus", "pids", "terminals"),
    }
)
# Mounts that every runtime makes.
_USUAL_READ_ONLY = ("/", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/sys", CHANNEL_MOUNT, RUNTIME_MOUNT)
_USUAL = ("/proc", "/dev", TERMINALS_MOUNT, "/dev/mqueue", "/sys/fs/cgroup")


def verify_confinement(
    seen: Confinement, spec: SandboxSpec, waived: frozenset[str] = NO_MEASURES, volumes: Collection[str] = ()
) -> list[str]:
    """What a sandbox made from `spec` lacks by its own report: a line each, beginning with the measure. `volumes`:
    places of its image that are mounted read-only."""
    demands = harden(spec, UidPair(seen.runner_uid, seen.worker_uid), Path("/"))
    gvisor = spec.runtime is not None and is_gvisor(spec.runtime)
    problems = (*_problems(seen, demands), *_mounts(seen, demands, volumes, gvisor=gvisor))
    return [f"{measure}: {text} (seen inside)" for measure, text in problems if measure not in waived]


def untold_by(runtime: str | None) -> frozenset[str]:
    """Measures that pid 1 cannot check under `runtime`: gVisor enforces them, but its /proc does not show them.

    Then the Engine's answer alone counts. gVisor must be registered under a name that begins with `runsc`; under
    another name the operator has to waive these measures.
    """
    return _UNTOLD_BY_GVISOR if runtime is not None and is_gvisor(runtime) else NO_MEASURES


def _problems(seen: Confinement, demands: Hardening) -> Iterator[tuple[str, str]]:
    """(measure, what is wrong)."""
    if seen.capability_bounding_set & ~_ALLOWED_CAPABILITIES:
        yield "capabilities", f"bounding set {seen.capability_bounding_set:#x}"
    if not seen.no_new_privileges:
        yield "no_new_privileges", "not set"
    if seen.seccomp_mode != _SECCOMP_FILTER:
        yield "seccomp", f"mode {seen.seccomp_mode}"
    if others := set(seen.network_interfaces) - {"lo"}:
        yield "network", f"interfaces {_listed(others)}"
    if demands.root is None and not seen.root_read_only:
        yield "read_only_root", "the root file system takes writes"
    uids = seen.runner_uid, seen.worker_uid
    if uids[0] == uids[1] or not all(FIRST_UID <= uid <= LAST_UID for uid in uids):
        yield IDENTITIES, f"runner {uids[0]}, worker {uids[1]}"
    if seen.process_id != 1:
        yield "namespaces", f"pid 1 is number {seen.process_id}"
    if not seen.own_control_groups:
        yield "namespaces", "control groups above its own show"
    if others := set(seen.devices) - _DEVICES:
        yield "devices", f"/dev has {_listed(others)}"
    if seen.exposed_paths:
        yield "hidden_paths", f"{_listed(seen.exposed_paths)} can be used"
    yield from _limits(seen, demands)
    if demands.root is not None:
        yield from _root(seen, demands.root)
    yield from _tmpfs(seen, demands.tmpfs)


def _limits(seen: Confinement, demands: Hardening) -> Iterator[tuple[str, str]]:
    most_by_name = {
        "memory": ("memory", demands.memory_bytes),
        "memory_and_swap": ("swap", demands.memory_bytes),
        "cpu_millis": ("cpus", ceil(demands.cpus * 1000)),
        "pids": ("pids", demands.pids),
        "terminals": ("terminals", TERMINALS),
        **{name: ("ulimits", most) for name, most in demands.ulimits.items()},
    }
    for name, (measure, most) in most_by_name.items():
        limit = seen.limits.get(name)
        if limit is None or limit > most:
            yield measure, f"{name} is {'unlimited' if limit is None else limit} instead of {most}"


def _tmpfs(seen: Confinement, places: Iterable[Tmpfs]) -> Iterator[tuple[str, str]]:
    for place in places:
        mount = next((m for m in reversed(seen.mounts) if m.target == place.target), None)
        if mount is None or mount.type != "tmpfs":
            yield "tmpfs", f"{place.target} is not a tmpfs"
        elif not (0 < mount.size_bytes <= place.size_bytes and 0 < mount.inodes <= place.inodes):
            yield "tmpfs", f"{place.target} takes {mount.size_bytes} bytes in {mount.inodes} files"
        elif not (mount.no_suid and mount.no_dev and mount.no_exec):
            yield "tmpfs", f"{place.target} is not nosuid, nodev and noexec"


def _root(seen: Confinement, bounds: RootBounds) -> Iterator[tuple[str, str]]:
    root = next((mount for mount in reversed(seen.mounts) if mount.target == "/"), None)
    if root is None or root.type != "overlay" or seen.root_read_only:
        yield "root_size", "the root file system is no overlay that takes writes"
    elif not (0 < root.size_bytes <= bounds.size_bytes and 0 < root.inodes <= bounds.inodes):
        yield "root_size", f"/ takes {root.size_bytes} bytes in {root.inodes} files"
    elif not (root.no_suid and root.no_dev):
        yield "mounts", "/ is not nosuid and nodev"


def _mounts(
    seen: Confinement, demands: Hardening, volumes: Collection[str], *, gvisor: bool
) -> Iterator[tuple[str, str]]:
    """Every mount must be an expected one, and read-only where it should be. gVisor shows no more of a mount."""
    ours = {*(place.target for place in demands.tmpfs), *MASKED_PATHS, *READ_ONLY_PATHS, *_USUAL}
    # An ordinary user can make no devices: a runtime mounts the machine's own there.
    ours |= {f"/dev/{name}" for name in _DEVICES}
    runtime = [mount for mount in seen.mounts if mount.target == RUNTIME_MOUNT]
    if len(runtime) != 1:
        yield "mounts", f"{RUNTIME_MOUNT} is mounted {len(runtime)} times"
    elif not (gvisor or (runtime[0].no_suid and runtime[0].no_dev)):
        yield "mounts", f"{RUNTIME_MOUNT} is not nosuid and nodev"
    read_only = {*_USUAL_READ_ONLY, *volumes}
    if demands.root is not None:
        ours.add("/")
        read_only.discard("/")
    for mount in seen.mounts:
        if mount.target in read_only or mount.target.startswith("/sys/fs/cgroup/"):
            if not mount.read_only:
                measure = "read_only_root" if mount.target == "/" else "mounts"
                yield measure, f"{mount.target} takes writes"
        elif mount.target not in ours:
            yield "mounts", f"unexpected mount {mount.target}"


def _listed(names: Iterable[str]) -> str:
    """The names on one line, shortened."""
    text = ", ".join(sorted(names))
    return text if len(text) <= 120 else f"{text[:100]}…"
