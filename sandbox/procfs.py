"""Reads /proc and /sys: the processes of the container, and how many were killed for memory."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_CGROUP_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),  # v2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # v1
)


class Processes:
    """All processes that can be seen from here. /proc is opened once: an agent that is root may close the way to
    it for all others."""

    def __init__(self) -> None:
        self._folder = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def of(self, uid: int) -> list[int]:
        """Process ids of everything that runs as `uid`."""
        return [pid for pid, _, owner in self._all() if owner == uid]

    def of_others(self, uids: Collection[int]) -> list[int]:
        """Process ids of everything that runs as none of `uids`."""
        return [pid for pid, _, owner in self._all() if owner not in uids]

    def below(self, ancestor: int, but_not: int) -> list[int]:
        """Process ids of everything below `ancestor`, the branch that starts at `but_not` left out."""
        children: dict[int, list[int]] = {}
        for pid, parent, _ in self._all():
            children.setdefault(parent, []).append(pid)
        pids: list[int] = []
        branches = [ancestor]
        while branches:
            for pid in children.get(branches.pop(), []):
                if pid != but_not:
                    pids.append(pid)
                    branches.append(pid)
        return pids

    def _all(self) -> Iterator[tuple[int, int, int]]:
        """(process id, parent's, real user id) of everything that runs."""
        for entry in os.listdir(self._folder):
            if entry.isdecimal():
                try:
                    status = status_of(entry, self._folder)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it ended meanwhile
                yield int(entry), int(status["PPid"]), int(status["Uid"].split()[0])


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


def status_of(pid: str, proc: int | None = None) -> dict[str, str]:
    """The fields of a process' status. `proc`: a descriptor of /proc. Raises OSError."""
    # Only the Name field can hold bytes beyond ASCII, and no caller reads it.
    path = f"/proc/{pid}/status" if proc is None else f"{pid}/status"
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    with open(file, encoding="utf-8", errors="replace") as status:
        fields = (line.partition(":") for line in status.read().splitlines())
        return {name: value.strip() for name, _, value in fields}
