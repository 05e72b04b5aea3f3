"""Which process made a container or a directory, and whether it still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_MACHINE_S_OWN = 0xEFFFFFFC  # PROC_PID_INIT_INO in linux/proc_ns.h


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, named by its start time too, so that a later one with the same pid is not mistaken for it.

    `host`: the host's name, and the PID namespace's number unless that is the machine's own. Processes of other
    namespaces cannot be looked up: pods with the host's network all have its name, and may share its Engine or
    /tmp. Orchestrators on several machines that share one Engine need host names of their own.
    """

    host: str
    pid: int
    started: int  # clock ticks since boot; 0: unknown

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that `str` wrote; None for any other text."""
        host, pid, started = (["", "", "", *text.rsplit(":", 2)])[-3:]
        if host and pid.isdecimal() and started.isdecimal():
            return cls(host, int(pid), int(started))
        return None

    @property
    def is_of_this_host(self) -> bool:
        """Whether it is a process of this host, so that it can be looked up."""
        return self.host == _host()

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended. Always False for another host's process."""
        if not self.is_of_this_host:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's process; its start time says whether it is this one
        state, started = _state_and_start(self.pid)
        return state == "Z" or (started != 0 and started != self.started)


def this_process() -> Owner:
    """This process. Not cached: a forked child is another owner."""
    return Owner(_host(), os.getpid(), _state_and_start(os.getpid())[1])


def _host() -> str:
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # no such file in this kernel, or /proc is not mounted
        return socket.gethostname()
    return socket.gethostname() + f".pid-{namespace}" * (namespace != _MACHINE_S_OWN)


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/pid/stat. The name before them may hold anything, even parentheses."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text("utf-8", "replace")
    except OSError:
        return "", 0
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])
