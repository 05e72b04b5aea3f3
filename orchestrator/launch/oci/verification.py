"""Looks at a container from outside, in /proc and its control groups, and compares it with what was asked for.

`launch/confinement` checks what pid 1 saw. Both use the names of measures of `hardening`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.launch.control_groups import CGROUPS, PROC, ControlGroup, control_groups, group_files
from orchestrator.launch.hardening import CAPABILITIES, NO_MEASURES, OOM_SCORE, Hardening, RootBounds
from orchestrator.launch.names import RUNTIME_MOUNT

_CAPABILITY_NUMBERS = {"SETGID": 6, "SETUID": 7}
_ALLOWED = sum(1 << _CAPABILITY_NUMBERS[name] for name in CAPABILITIES)
_NAMESPACES = {"net": "network", "ipc": "ipc", "pid": "namespaces", "uts": "namespaces", "mnt": "namespaces"}
# From outside one sees gVisor's own process, which carries the sandbox: only what its control group limits.
UNTOLD_BY_GVISOR = frozenset(
    {
        *("capabilities", "no_new_privileges", "seccomp", "oom_score", "network", "ipc", "namespaces"),
        *("read_only_root", "mounts", "ulimits"),
    }
)
_ULIMITS = {
    "core": "Max core file size",
    "fsize": "Max file size",
    "msgqueue": "Max msgqueue size",
    "nofile": "Max open files",
}


def verify(
    pid: int,
    name: str,
    hardening: Hardening,
    waived: frozenset[str] = NO_MEASURES,
    *,
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
) -> list[str]:
    """What the container `name` with pid 1 `pid` lacks: a line each, beginning with the measure. Raises OSError if
    it has ended; what is just ending has lost its control groups already."""
    problems = [*_process(pid, hardening, proc), *_limits(pid, name, hardening, proc, cgroups)]
    return [f"{measure} {text}" for measure, text in problems if measure not in waived]


def _process(pid: int, hardening: Hardening, proc: Path) -> Iterator[tuple[str, str]]:
    own = proc / str(pid)
    fields = (line.partition(":") for line in (own / "status").read_text().splitlines())
    status = {"CapBnd": "f" * 16, "CapEff": "f" * 16, "NoNewPrivs": "?", "Seccomp": "?"}
    status |= {name: value.strip() for name, _, value in fields}
    if int(status["CapBnd"], 16) & ~_ALLOWED or int(status["CapEff"], 16) & ~_ALLOWED:
        yield "capabilities", f"are {status['CapEff']} of {status['CapBnd']}"
    if status["NoNewPrivs"] != "1":
        yield "no_new_privileges", "is not set"
    if status["Seccomp"] != "2":
        yield "seccomp", f"has mode {status['Seccomp']}"
    if (score := int((own / "oom_score_adj").read_text())) < OOM_SCORE:
        yield "oom_score", f"is {score} instead of {OOM_SCORE}"
    for namespace, measure in _NAMESPACES.items():
        if os.readlink(own / "ns" / namespace) == os.readlink(proc / "self" / "ns" / namespace):
            yield measure, f"include this machine's own ({namespace})"
    mounts = [line.split() for line in (own / "mountinfo").read_text().splitlines()]
    roots = [mount for mount in mounts if mount[4] == "/"]
    if hardening.root is None and not any("ro" in mount[5].split(",") for mount in roots):
        yield "read_only_root", "is not: the root file system takes writes"
    runtime = [mount for mount in mounts if mount[4] == RUNTIME_MOUNT]
    if len(runtime) != 1 or not {"ro", "nosuid", "nodev"} <= set(runtime[0][5].split(",")):
        yield "mounts", f"have {RUNTIME_MOUNT} {len(runtime)} times, or not read-only, nosuid and nodev"
    if hardening.root is not None:
        yield from _root(roots[-1], os.statvfs(own / "root"), hardening.root)
    limits = (own / "limits").read_text().splitlines()
    for name, most in hardening.ulimits.items():
        rows = [line[len(_ULIMITS[name]) :].split() for line in limits if line.startswith(_ULIMITS[name])]
        hard = rows[0][1] if rows else "unlimited"
        if hard == "unlimited" or int(hard) > most:
            yield "ulimits", f"have {name} {hard} instead of {most}"


def _root(mount: Sequence[str], capacity: os.statvfs_result, bounds: RootBounds) -> Iterator[tuple[str, str]]:
    """`mount`: the fields of its line in mountinfo."""
    options = mount[5].split(",")
    if mount[mount.index("-") + 1] != "overlay" or "rw" not in options:
        yield "root_size", f"is not bounded: the root is {mount[mount.index('-') + 1]} {mount[5]}"
    if not {"nosuid", "nodev"} <= {*options}:
        yield (
            "mounts",
            "have a root without nosuid and nodev, as crun makes it for root: use runc (--env.oci_runtime)",
        )
    size = capacity.f_blocks * capacity.f_frsize
    if not (0 < size <= bounds.size_bytes and 0 < capacity.f_files <= bounds.inodes):
        yield "root_size", f"is {size} bytes in {capacity.f_files} files instead of {bounds}"


def _limits(pid: int, name: str, hardening: Hardening, proc: Path, cgroups: Path) -> Iterator[tuple[str, str]]:
    groups = control_groups(pid, name, proc)

    def number(controller: str, v1_name: str, v2_name: str) -> int | None:
        return _number(groups, controller, v1_name, v2_name, cgroups)

    memory = number("memory", "memory.limit_in_bytes", "memory.max")
    both = number("memory", "memory.memsw.limit_in_bytes", "-")
    if both is None and (swap := number("memory", "-", "memory.swap.max")) is not None and memory is not None:
        both = memory + swap
    limits = {
        "memory": (memory, hardening.memory_bytes),
        "swap": (both, hardening.memory_bytes),
        "pids": (number("pids", "pids.max", "pids.max"), hardening.pids),
        "cpus": (_cpu_millis(groups, cgroups), -(-round(hardening.cpus * 1e6) // 1000)),
    }
    for measure, (limit, most) in limits.items():
        if limit is None or limit > most:
            yield measure, f"is {'unlimited' if limit is None else limit} instead of {most}"


def _number(groups: list[ControlGroup], controller: str, v1_name: str, v2_name: str, cgroups: Path) -> int | None:
    """None: no such file, or no limit in it."""
    file = next(group_files(groups, controller, v1_name, v2_name, cgroups), None)
    text = "" if file is None else file.read_text().strip()
    return int(text) if text.isdecimal() else None


def _cpu_millis(groups: list[ControlGroup], cgroups: Path) -> int | None:
    file = next(group_files(groups, "cpu", "cpu.cfs_quota_us", "cpu.max", cgroups), None)
    if file is None:
        return None
    words = file.read_text().split()
    if len(words) == 1:
        words += (file.with_name("cpu.cfs_period_us")).read_text().split()
    quota, period = words
    return int(quota) * 1000 // int(period) if quota.isdecimal() else None
