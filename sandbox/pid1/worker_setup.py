"""Turns a process forked from pid 1 into a clean place for model-written code.

What pid 1 needed for itself (its pipes, environment and import path, and packages with stand-ins in them) is
removed before any such code runs.
"""

import contextlib
import fcntl
import os
import site
import sys
import time
from types import ModuleType

from sandbox.boot.diet import HOLDERS
from sandbox.types import Box
from sandbox.worker.streams import SPARE_FD
from sandbox.worker.worker import COMMANDS_FD, FRAMES_FD

_OURS = ("sandbox", "rollout_api", *HOLDERS)
_USER = "user"  # the worker's uid has no name in the image; `getpass.getuser` reads LOGNAME and USER first
_FIRST_FREE_FD = 6
_PACKAGES = "/opt/packages"  # of an image; Python looks for them at its start, where a parent of forks has none
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_ALL_PROGRAMS = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as Docker's, for an agent with an account
)
_kept_alive: list[ModuleType] = []  # freeing them would copy the memory this process shares with pid 1


def place_pipes(commands: int, frames: int, output: int) -> None:
    """Leaves descriptors 0 to 5 and no others: /dev/null, output twice, commands, frames, output once more."""
    null = os.open(os.devnull, os.O_RDONLY)
    # Duplicated to 16 and above first: a source may have the number of another one's target.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (null, output, output, commands, frames, output)]
    for target, source in enumerate(sources):
        # Programs that are started from here inherit the standard three alone.
        os.dup2(source, target, inheritable=target not in (COMMANDS_FD, FRAMES_FD, SPARE_FD))
    os.closerange(_FIRST_FREE_FD, os.sysconf("SC_OPEN_MAX"))


def clean_process(box: Box, cpu_millis: int | None) -> None:
    """Sets environment, working directory and import path, and takes our modules out of `sys.modules`.

    `cpu_millis`: thousandths of a CPU that the sandbox may use; None: no limit.
    """
    if cpu_millis is not None:
        _show_cpus(_cpus(cpu_millis))
    ours = {"", os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    # The working directory comes first, as in an interactive Python.
    sys.path[:] = ["", *(entry for entry in sys.path if entry not in ours)]
    if _PACKAGES not in sys.path and os.path.isdir(_PACKAGES):
        sys.path.append(_PACKAGES)
    sys.argv[:] = [""]
    temporary = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
    os.environ.clear()
    os.environ.update({**temporary, **agent_environment(box, cpu_millis)})
    time.tzset()
    site.USER_BASE = site.USER_SITE = None  # `site` finds them again on demand: these were below pid 1's HOME
    os.chdir(box.workspace)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OURS:
            _kept_alive.append(module)
            del sys.modules[name]


def agent_environment(box: Box, cpu_millis: int | None) -> dict[str, str]:
    """The variables of the agent's processes. `cpu_millis`: as above."""
    user, home = (_USER, str(box.workspace)) if box.agent is None else _account(box.agent.uid)
    cpus = str(_cpus(cpu_millis))
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:{_PROGRAMS if box.agent is None else _ALL_PROGRAMS}",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Libraries, `nproc` and a Python that is started from here would count the CPUs of the machine.
        "OMP_NUM_THREADS": cpus,
        "PYTHON_CPU_COUNT": cpus,
        **dict(box.environment),
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "PWD": str(box.workspace),
    }


def _cpus(cpu_millis: int | None) -> int:
    cpus = len(os.sched_getaffinity(0))
    return cpus if cpu_millis is None else min(cpus, max(1, -(-cpu_millis // 1000)))


def _account(uid: int) -> tuple[str, str]:
    """(name, home) of a user of the image, by its number."""
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8", errors="replace") as accounts:
        for line in accounts:
            name, _, number, _, _, home, *_ = (*line.split(":"), *[""] * 6)
            if number == str(uid):
                return name, home or "/"
    return (_USER, "/") if uid else ("root", "/root")


def _show_cpus(cpus: int) -> None:
    """Makes pools of processes and threads as large as the control group's limit. The process stays free to run on
    any CPU: sandboxes bound to some would wait for each other while others idle."""
    allowed = os.sched_getaffinity

    def cpu_count() -> int:
        return cpus

    def sched_getaffinity(pid: int, /) -> set[int]:
        return set(sorted(allowed(pid))[:cpus])

    for counted in (cpu_count, sched_getaffinity):
        counted.__qualname__, counted.__module__ = counted.__name__, "os"
        setattr(os, counted.__name__, counted)
