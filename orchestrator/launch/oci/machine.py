"""What this machine lets an OCI runtime do: asked before a run."""

import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.control_groups import CGROUPS, PROC, beside
from orchestrator.launch.fitting import old_runc, too_big, too_many, too_much_memory
from orchestrator.launch.hardening import ID_RANGES, NO_MEASURES
from orchestrator.launch.names import is_gvisor
from orchestrator.launch.oci.call_filter import load_libseccomp
from orchestrator.launch.oci.program import find_oci_runtime
from orchestrator.launch.oci.user_namespace import user_namespace
from orchestrator.types import SandboxSpec

_VERSION_S = 20.0
_REASON_CHARS = 300
_CAP_SYS_RESOURCE = 24
_CONTROLLERS = {"memory": "memory", "swap": "memory", "cpus": "cpu", "pids": "pids"}
_SWAP_V1, _SWAP_V2 = "memory.memsw.limit_in_bytes", "memory.swap.max"
NO_SWAP = "the kernel does not count swap (boot it with swapaccount=1)"


def runtime_version(program: str) -> str:
    """The first line that the runtime says of its version. Raises EnvironmentUnusable if it does not start."""
    # Without a place for its state, crun does not even say its version to a user without a session.
    argv = [program, "--root", tempfile.gettempdir(), "--version"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_VERSION_S, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentUnusable(f"the OCI runtime {program} does not start: {error}") from error
    output, errors = (text.decode("utf-8", "replace").split("\n") for text in (done.stdout, done.stderr))
    if done.returncode != 0 or not output[0].strip():
        reason = next(filter(None, errors), f"exit code {done.returncode}, and nothing said")
        raise EnvironmentUnusable(f"the OCI runtime {program} does not start: {reason.strip()[:_REASON_CHARS]}")
    return output[0].strip()


def why_not_here(runtime: str, waived: frozenset[str] = NO_MEASURES) -> str | None:
    """Why sandboxes cannot be made here by the program `runtime`; None: they can."""
    try:
        find_oci_runtime(runtime)
    except EnvironmentUnusable as error:
        return str(error)
    return why_no_containers() or next(iter(missing_limits(waived)), None)


def why_no_containers() -> str | None:
    """Why this user cannot make containers; None: it can."""
    try:
        user_namespace()
    except EnvironmentUnusable as error:
        return str(error)
    return None


def why_no_forks(runtime: str) -> str | None:
    """Why sandboxes cannot be forked here (`env.start fork`); None: they can. More shows when a parent starts."""
    if is_gvisor(runtime):
        return "env.start fork takes runc or crun: gVisor's sandboxes cannot be forked"
    try:
        load_libseccomp()
    except EnvironmentUnusable as error:
        return str(error)
    return None


def too_low_limits(ulimits: Mapping[str, int], *, forked: bool) -> str | None:
    """Which limit of a sandbox is above the hard one of this process, which what it starts, or forks, may not
    raise; None: none is."""
    if not forked and _may_raise_limits():
        return None
    for name, most in ulimits.items():
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        if hard != resource.RLIM_INFINITY and hard < most:
            return (
                f"a sandbox has a limit RLIMIT_{name.upper()} of {most}, and ours is {hard}: raise the hard limit"
            )
    return None


def _may_raise_limits(proc: Path = PROC) -> bool:
    capable = re.search(r"CapEff:\s*(\w+)", (proc / "self" / "status").read_text())
    return capable is not None and bool(int(capable[1], 16) >> _CAP_SYS_RESOURCE & 1)


def missing_limits(
    waived: frozenset[str] = NO_MEASURES, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> list[str]:
    """Measures that no control group of this process' can enforce, a line each."""
    groups = [line.split(":", 2)[1:] for line in (proc / "self" / "cgroup").read_text().splitlines()]
    problems = []
    for measure, controller in _CONTROLLERS.items():
        if measure not in waived and (why := _why_not(measure, controller, groups, cgroups)) is not None:
            problems.append(f"{measure}: cannot be limited here: {why}")
    return problems


def missing_ranges(spec: SandboxSpec, waived: frozenset[str] = NO_MEASURES) -> list[str]:
    """What an ordinary user cannot keep apart where agents may be root inside, a line each."""
    if not spec.is_writable or os.geteuid() == 0 or ID_RANGES in waived:
        return []
    return [
        f"{ID_RANGES}: without root, the agents of all sandboxes have the id of this user: what the kernel "
        "limits per user (pipe buffers, watched files), one can use up for all"
    ]


def _why_not(measure: str, controller: str, groups: list[list[str]], cgroups: Path) -> str | None:
    for names, path in groups:
        if controller in names.split(","):
            folders = [cgroups / mounted / path.lstrip("/") for mounted in (controller, names)]
            folder = next((folder for folder in folders if folder.is_dir()), None)
            if folder is None:
                return f"the control group {path} of {controller} cannot be seen"
            if measure == "swap" and not (folder / _SWAP_V1).exists():
                return NO_SWAP
            return _why_not_ours(folder)
    own = next((path for names, path in groups if not names), None)
    if own is None:
        return f"the kernel has no control groups with {controller}"
    folder = cgroups / beside(own).lstrip("/")
    if (why := _why_not_handed_on(controller, folder, cgroups)) is not None:
        return why
    limited_groups = [group for group in folder.iterdir() if (group / "memory.max").exists()]
    if measure == "swap" and limited_groups and not any((group / _SWAP_V2).exists() for group in limited_groups):
        return NO_SWAP
    return _why_not_ours(folder)


def _why_not_ours(folder: Path) -> str | None:
    if os.access(folder, os.W_OK):
        return None
    return f"this user may not change the control group {folder}: let it be delegated"


def _why_not_handed_on(controller: str, folder: Path, cgroups: Path) -> str | None:
    """Why groups in `folder` cannot have that controller of cgroup v2; None: they have it, or the runtime hands it
    on to them, from group to group, as runc and crun do where they may."""
    for group in (folder, *folder.parents):
        try:
            if controller in (group / "cgroup.subtree_control").read_text().split():
                return None
            is_offered = controller in (group / "cgroup.controllers").read_text().split()
            # The machine's root is the one group that has no type, and may have processes beside groups.
            busy = (group / "cgroup.type").exists() and (group / "cgroup.procs").read_text().strip()
        except OSError:
            return f"the control group {group} cannot be seen"
        if not os.access(group / "cgroup.subtree_control", os.W_OK):
            return f"the control group {group} does not offer {controller}: let it be delegated"
        if busy:
            return f"the control group {group} has processes, so no limits below it: run in a group of your own"
        if is_offered:
            return None
        if group == cgroups:
            break
    return f"the kernel has no control groups with {controller}"


def does_not_fit(spec: SandboxSpec) -> str | None:
    """Why a sandbox of this size does not fit into this machine, and what to do; None: it does."""
    return too_big(spec, _memory_bytes(), os.cpu_count() or 1)


def lacks_memory(spec: SandboxSpec) -> str | None:
    """Why this machine has not the memory for a sandbox; None: it has."""
    return too_much_memory(spec, _memory_bytes())


def advice(spec: SandboxSpec, max_sandboxes: int, version: str) -> list[str]:
    """Lines that an operator should know and may ignore. `version`: what the runtime says of itself."""
    name, _, number = version.partition(" version ")
    lines = [too_many(spec, max_sandboxes, _memory_bytes()), old_runc(number) if name == "runc" else None]
    return [line for line in lines if line is not None]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
