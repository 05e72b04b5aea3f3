"""How a sandbox is confined, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount in a sandbox as its pid 1 sees it. `size_bytes` and `inodes` are 0 unless it is a tmpfs."""

    target: str
    type: str
    read_only: bool = False
    no_suid: bool = False
    no_dev: bool = False
    no_exec: bool = False
    size_bytes: int = 0
    inodes: int = 0


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a sandbox reports about its own limits, from /proc of its pid 1.

    `limits`: memory, memory_and_swap (bytes), cpu_millis, pids, and hard ulimits by name; a missing one is
    unlimited or unknown. `exposed_paths`: paths that show or give more than a sandbox may have.
    """

    capability_bounding_set: int
    no_new_privileges: bool
    seccomp_mode: int
    network_interfaces: tuple[str, ...]
    root_read_only: bool
    runner_uid: int
    worker_uid: int
    process_id: int
    own_control_groups: bool
    mounts: tuple[Mount, ...]
    limits: Mapping[str, int]
    devices: tuple[str, ...]
    exposed_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How a container ended. `exit_code` None: unknown."""

    exit_code: int | None
    oom_killed: bool
    reason: str = ""
