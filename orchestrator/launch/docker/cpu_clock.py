"""CPU time of a container, read from the kernel's counter within microseconds. The Engine takes longer, up to a
second for a container that has just ended.

A container may have no control group of its own (an Engine without cgroups, a controller that is not delegated).
Then its counter includes other processes, up to the whole machine, and the Engine's figure does too. So the time
counts as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CLOCKS_DIFFER_S = 0.1


@dataclass(frozen=True, slots=True)
class CpuClock:
    """`counter`: the kernel's file, if it can be read here. `elsewhere`: it cannot, as the Engine is on another
    machine or we are in a container, so the Engine is to be asked. `cpus`: of the machine."""

    counter: Path | None
    elsewhere: bool
    cpus: int

    @classmethod
    def of(
        cls, pid: int, container_id: str, cpus: int, *, proc: Path = _PROC, cgroups: Path = _CGROUPS
    ) -> CpuClock:
        """For the container whose pid 1 is `pid` in `proc`."""
        try:
            lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return cls(None, True, cpus)
        groups = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
        own = [(names, group) for names, path in groups if (group := _own_group(path, container_id)) is not None]
        counter = next((file for names, group in own for file in _counters(cgroups, names, group)), None)
        # The Engine reads the hierarchy of v1 if there is one.
        v1 = any(_counts(names) for names, _ in groups)
        elsewhere = counter is None and any(_counts(names) if v1 else names == "" for names, _ in own)
        return cls(counter, elsewhere, cpus)

    def read_s(self, running_s: float) -> float | None:
        """CPU seconds by the counter. `running_s`: how long the container has been running. None: unknown."""
        return None if self.counter is None else self.plausible(_read_s(self.counter), running_s)

    def plausible(self, cpu_s: float | None, running_s: float) -> float | None:
        """`cpu_s`; None if it is impossible: zero, or more than all CPUs of the machine had."""
        possible = cpu_s is not None and 0 < cpu_s <= (running_s + _CLOCKS_DIFFER_S) * self.cpus
        return cpu_s if possible else None


def _own_group(path: str, container_id: str) -> str | None:
    """The path of the container's own group, without groups made below it; None: it has none."""
    named = re.compile(rf"(?:[\w.]+-)*{re.escape(container_id)}(?:\.scope)?")
    parts = path.split("/")
    place = next((place for place, part in enumerate(parts) if named.fullmatch(part)), None)
    return None if place is None else "/".join(parts[: place + 1]).lstrip("/")


def _counts(names: str) -> bool:
    """Whether these controllers of v1 count CPU time."""
    return "cpuacct" in names.split(",")


def _counters(cgroups: Path, names: str, group: str) -> Iterator[Path]:
    """The files that count a group's CPU time. `names`: controllers of v1, empty for v2."""
    if ".." in group.split("/"):  # in another namespace than ours
        return
    found: list[Path] = []
    if not names:
        found = [cgroups / group / "cpu.stat", cgroups / "unified" / group / "cpu.stat"]
    elif _counts(names):
        found = [cgroups / mounted / group / "cpuacct.usage" for mounted in ("cpuacct", names)]
    yield from (file for file in found if file.is_file())


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
