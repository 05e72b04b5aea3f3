"""The machine: what it is, and what it has spent so far. Reads /proc and /sys; Linux only."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.launch.docker.client import connect

TICKS = os.sysconf("SC_CLK_TCK")
ENGINE_S = 60
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def describe() -> dict[str, Any]:
    """What a reader must know to compare. No host name. Raises EnvironmentUnusable where there is no Docker."""
    client = connect(ENGINE_S)
    try:
        info, version = client.info(), client.version()
    finally:
        client.close()
    parts = {part["Name"]: part["Version"] for part in version.get("Components", ())}
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    total = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "cores": cores(),
        "cpu": model[1] if model else platform.machine(),
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "engine": info["ServerVersion"],
        "runc": parts.get("runc", ""),
        "storage": info["Driver"],
        "cgroup": info.get("CgroupVersion", "1"),
        "load": round(load(), 2),
    }


def busy_s(without: Sequence[int] = ()) -> float:
    """CPU seconds this machine has spent since it started, less those of the processes `without`.

    Everything is in it: the Engine, its shims, runc, file systems in user space, the kernel's own work.
    """
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS - sum(map(process_cpu_s, without))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


MAX_OTHERS = 0.3  # CPU seconds a second; what is subtracted must not be larger than what is measured


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Spent by the whole machine, less what others use. `others`: CPU seconds a second while we did nothing."""

    others: float
    without: tuple[int, ...] = ()

    @classmethod
    async def open(cls, seconds: float, without: Sequence[int] = ()) -> CpuMeter:
        """Watches the machine for a while. `without`: processes whose time is nobody's cost."""
        before, started = busy_s(without), time.perf_counter()
        await asyncio.sleep(seconds)
        return cls((busy_s(without) - before) / (time.perf_counter() - started), tuple(without))

    @property
    def trouble(self) -> str:
        """Why nothing can be said; empty: it can."""
        if self.others <= MAX_OTHERS:
            return ""
        return f"not to be told: others used {self.others:.2f} CPU-s a second of this machine"

    def now(self) -> tuple[float, float]:
        """(CPU seconds of the machine, wall clock), for `since`."""
        return busy_s(self.without), time.perf_counter()

    def since(self, then: tuple[float, float]) -> float:
        """CPU seconds since `then`, less the others' share."""
        busy, wall = self.now()
        return max(0.0, busy - then[0] - self.others * (wall - then[1]))


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Threads of this process, those of C libraries too."""
    return len(os.listdir("/proc/self/task"))
