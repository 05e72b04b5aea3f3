"""Turns a process forked from pid 1 into a clean place for model-written code.

What pid 1 needed for itself (its pipes, environment and import path, and packages with stand-ins in them) is
removed before any such code runs.
"""

from __future__ import annotations

import fcntl
import os
import site
import sys
import time
from pathlib import Path
from types import ModuleType

from sandbox.boot.diet import HOLDERS
from sandbox.worker.worker import COMMANDS_FD, FRAMES_FD

_OURS = ("sandbox", "rollout_api", *HOLDERS)
_USER = "user"  # the worker's uid has no name in the image; `getpass.getuser` reads LOGNAME and USER first
_FIRST_FREE_FD = 5
_kept_alive: list[ModuleType] = []  # freeing them would copy the memory this process shares with pid 1


def place_pipes(commands: int, frames: int, output: int) -> None:
    """Leaves descriptors 0 to 4 and no others: /dev/null, output twice, commands, frames."""
    null = os.open(os.devnull, os.O_RDONLY)
    # Duplicated to 16 and above first: a source may have the number of another one's target.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (null, output, output, commands, frames)]
    for target, source in enumerate(sources):
        # Child processes inherit the standard three, and not the pipes of commands and frames.
        os.dup2(source, target, inheritable=target not in (COMMANDS_FD, FRAMES_FD))
    os.closerange(_FIRST_FREE_FD, os.sysconf("SC_OPEN_MAX"))


def clean_process(workspace: Path) -> None:
    """Sets environment, working directory and import path, and takes our modules out of `sys.modules`."""
    ours = {"", os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    # The working directory comes first, as in an interactive Python.
    sys.path[:] = ["", *(entry for entry in sys.path if entry not in ours)]
    sys.argv[:] = [""]
    temporary = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
    os.environ.clear()
    os.environ.update(
        {
            **temporary,
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(workspace),
            "USER": _USER,
            "LOGNAME": _USER,
            "PWD": str(workspace),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",  # numpy would start a thread for each CPU of the machine
        }
    )
    time.tzset()
    site.USER_BASE = site.USER_SITE = None  # `site` finds them again on demand: these were below pid 1's HOME
    os.chdir(workspace)
    for module in _our_modules():
        _kept_alive.append(module)
        del sys.modules[module.__name__]


def _our_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in _OURS]
