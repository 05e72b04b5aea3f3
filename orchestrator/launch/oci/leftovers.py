"""Containers that a killed orchestrator and its keeper have left: removed by what their directory says.

RUNTIME   the runtime's program   STATE/NAME/   what the runtime remembers of the container NAME
"""

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.oci.groups import clear, is_forked
from orchestrator.launch.oci.program import environment
from orchestrator.launch.oci.user_namespace import user_namespace

log = logging.getLogger(__name__)

_RUNTIME, _STATE = "runtime", "state"
_REMOVAL_S = 60.0


def remember(directory: Path, program: str) -> None:
    """Notes in a launcher's directory which runtime has its containers. Raises OSError."""
    (directory / _RUNTIME).write_text(program)
    (directory / _STATE).mkdir(mode=0o700)  # this user's, whoever runs the runtime


def runtime_command(program: str, directory: Path, options: Sequence[str] = ()) -> list[str]:
    """The runtime's program with global options, which make it remember its containers in `directory`."""
    return [program, *options, "--root", str(directory / _STATE)]


def remove_containers(directory: Path) -> tuple[int, int]:
    """(how many containers of this directory were removed, how many could not be). Blocks."""
    try:
        program = (directory / _RUNTIME).read_text()
        if not os.path.isabs(program):
            raise ValueError(program)
        # crun keeps compiled filters of system calls in `.cache` there.
        names = [place.name for place in (directory / _STATE).iterdir() if not place.name.startswith(".")]
        users = user_namespace() if names else None
    except (OSError, ValueError):
        return 0, 0
    except EnvironmentUnusable as error:  # it could be made when the containers were
        log.warning("containers could not be removed: %s", error)
        return 0, len(names)
    removed = 0
    # What was forked ends with its parent, and no runtime knows it.
    for name in sorted(names, key=lambda name: is_forked(str(directory / _STATE / name))):
        if clear(state := str(directory / _STATE / name)):
            removed += 1
            continue
        if is_forked(state):
            log.warning("container %s could not be removed: its control groups are still in use", name)
            continue
        command = [*runtime_command(program, directory), "delete", "--force", name]
        command = command if users is None else users.entered_by(command)
        try:
            done = subprocess.run(  # noqa: S603 - the launcher's own
                command, capture_output=True, timeout=_REMOVAL_S, check=False, env=environment(program)
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("container %s could not be removed: %s", name, error)
            continue
        if done.returncode == 0 or not (directory / _STATE / name).exists():
            removed += 1
        else:
            reason = " ".join(done.stderr.decode("utf-8", "replace").split())[-300:]
            log.warning("container %s could not be removed: %s", name, reason)
    return removed, len(names) - removed
