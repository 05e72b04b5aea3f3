"""Whether sandboxes fit into a machine, and whether its runc is old: one text for all launchers. Pure."""

import re

from orchestrator.launch.hardening import MIB
from orchestrator.types import SandboxSpec

# By runc's own advisories: the first release of each branch with the fix; later branches have it too.
_RUNC_FIXES = (
    ("CVE-2024-21626", ((1, 1, 12),)),
    ("CVE-2025-31133", ((1, 2, 8), (1, 3, 3), (1, 4, 0))),  # and -52565, -52881
)
RUNC = "runc "  # how the note on its age begins


def too_big(spec: SandboxSpec, memory_bytes: int, cpus: int) -> str | None:
    """Why one sandbox does not fit into a machine of this size, and what to do; None: it does."""
    if why := too_much_memory(spec, memory_bytes):
        return f"{why}: lower --env.sandbox_memory" + " or --env.sandbox_storage" * spec.is_writable
    if spec.cpus > cpus:
        return f"a sandbox of {spec.cpus:g} CPUs does not fit into {cpus}: lower --env.sandbox_cpus"
    return None


def too_much_memory(spec: SandboxSpec, memory_bytes: int) -> str | None:
    """Why one sandbox does not fit into so much; None: it does."""
    if spec.memory_limit_bytes <= memory_bytes:
        return None
    size, room = spec.memory_limit_bytes // MIB, memory_bytes // MIB
    return f"a sandbox of {size} MiB does not fit into this machine's {room} MiB"


def too_many(spec: SandboxSpec, max_sandboxes: int, memory_bytes: int) -> str | None:
    """That all sandboxes together could want more memory than there is; None: they could not."""
    if max_sandboxes * spec.memory_limit_bytes <= memory_bytes:
        return None
    return (
        f"{max_sandboxes} sandboxes of {spec.memory_limit_bytes // MIB} MiB could together want more than "
        f"the machine's {memory_bytes // MIB} MiB"
    )


def old_runc(version: str) -> str | None:
    """That a runc of this version, like 1.1.5+ds1, has known holes; None: it has none, or it is no version."""
    version_match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if version_match is None:
        return None
    number = tuple(map(int, version_match.groups()))
    missing = []
    for name, fixes in _RUNC_FIXES:
        same_branch = [first for first in fixes if first[:2] == number[:2]]
        if number < (same_branch or fixes)[-1]:
            missing.append(name)
    if not missing:
        return None
    return (
        f"{RUNC}{'.'.join(version_match.groups())} is older than its fixes of {' and '.join(missing)} "
        "(a distribution may have backported them)"
    )
