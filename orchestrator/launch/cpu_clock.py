"""CPU time of a container, read from the kernel's counter within microseconds. The Engine takes longer, up to a
second for a container that has just ended.

A container may have no control group of its own (an Engine without cgroups, a controller that is not delegated).
Then its counter includes other processes, up to the whole machine, and the Engine's figure does too. So the time
counts as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.launch.control_groups import CGROUPS, PROC, control_groups, group_files

_CLOCKS_DIFFER_S = 0.1


@dataclass(frozen=True, slots=True)
class CpuClock:
    """`counter`: the kernel's file, if it can be read here. `elsewhere`: it cannot, as the Engine is on another
    machine or we are in a container, so the Engine is to be asked. `cpus`: of the machine."""

    counter: Path | None
    elsewhere: bool
    cpus: int

    @classmethod
    def of(cls, pid: int, container_id: str, cpus: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> CpuClock:
        """For the container whose pid 1 is `pid` in `proc`."""
        try:
            groups = control_groups(pid, container_id, proc)
        except OSError:
            return cls(None, True, cpus)
        counter = next(group_files(groups, "cpuacct", "cpuacct.usage", "cpu.stat", cgroups), None)
        # The Engine reads the hierarchy of v1 if there is one.
        v1 = any(group.has("cpuacct") for group in groups)
        own = [group for group in groups if group.own is not None]
        elsewhere = counter is None and any(group.has("cpuacct") if v1 else not group.controllers for group in own)
        return cls(counter, elsewhere, cpus)

    def read_s(self, running_s: float) -> float | None:
        """CPU seconds by the counter. `running_s`: how long the container has been running. None: unknown."""
        return None if self.counter is None else self.plausible(_read_s(self.counter), running_s)

    def plausible(self, cpu_s: float | None, running_s: float) -> float | None:
        """`cpu_s`; None if it is impossible: zero, or more than all CPUs of the machine had."""
        possible = cpu_s is not None and 0 < cpu_s <= (running_s + _CLOCKS_DIFFER_S) * self.cpus
        return cpu_s if possible else None


def _read_s(counter: Path) -> float | None:
    """None: the control group is gone."""
    try:
        text = counter.read_text()
        if counter.name == "cpuacct.usage":
            return int(text) / 1e9
        fields = dict(line.split(maxsplit=1) for line in text.splitlines())
        return int(fields["usage_usec"]) / 1e6
    except (OSError, ValueError, KeyError):
        return None
