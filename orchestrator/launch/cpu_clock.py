"""CPU time of a container, read where the kernel counts it: microseconds, where the Engine takes longer
and for a container that has just ended even a second."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def cpu_file(pid: int, container_id: str) -> Path | None:
    """The counter of the container whose pid 1 is `pid` here; None where its control group is out of sight
    (an Engine elsewhere, an orchestrator that is itself in a container)."""
    try:
        lines = Path("/proc", str(pid), "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if container_id not in path:
            continue
        group = path.lstrip("/")
        if controllers == "":
            found = _CGROUPS / group / "cpu.stat"
        elif "cpuacct" in controllers.split(","):
            found = _CGROUPS / "cpuacct" / group / "cpuacct.usage"
        else:
            continue
        if found.is_file():
            return found
    return None


def read_cpu_s(counter: Path) -> float | None:
    """None: the control group is gone."""
    try:
        text = counter.read_text()
    except OSError:
        return None
    if counter.name == "cpuacct.usage":
        return int(text) / 1e9
    fields = dict(line.split(maxsplit=1) for line in text.splitlines())
    return int(fields["usage_usec"]) / 1e6
