"""Reads /proc and /sys: the processes of the container, and how many were killed for memory."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_CGROUP_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),  # v2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # v1
)


def processes_of(uid: int) -> list[int]:
    """Process ids of everything that runs as `uid`."""
    return [pid for pid, _, owner in _processes() if owner == uid]


def processes_of_others(uids: Collection[int]) -> list[int]:
    """Process ids of everything that runs as none of `uids`."""
    return [pid for pid, _, owner in _processes() if owner not in uids]


def descendants_of(ancestor: int, but_not: int) -> list[int]:
    """Process ids of everything below `ancestor`, the branch that starts at `but_not` left out."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in _processes():
        children.setdefault(parent, []).append(pid)
    pids: list[int] = []
    branches = [ancestor]
    while branches:
        for pid in children.get(branches.pop(), []):
            if pid != but_not:
                pids.append(pid)
                branches.append(pid)
    return pids


def memory_kills() -> int | None:
    """How often the kernel killed a process of our control group for memory; None: no such counter."""
    for path in _CGROUP_COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def _processes() -> Iterator[tuple[int, int, int]]:
    """(process id, parent's, real user id) of everything that runs."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                status = status_of(entry)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            yield int(entry), int(status["PPid"]), int(status["Uid"].split()[0])


def status_of(pid: str) -> dict[str, str]:
    """The fields of a process' status. Raises OSError."""
    # Only the Name field can hold bytes beyond ASCII, and no caller reads it.
    text = Path("/proc", pid, "status").read_text("utf-8", "replace")
    fields = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in fields}
