"""What pid 1 of a sandbox without an agent is told, and what it says of the command that it ran.

It reads a folder that only it can reach, as `sandbox.pid1.command` describes it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestrator.launch.base import Command, CommandEnd
from orchestrator.launch.contents import APP, PYTHON
from orchestrator.launch.hardening import Hardening
from orchestrator.launch.names import CHANNEL_GID, CHANNEL_MOUNT
from orchestrator.launch.uids import UidPair

_NAMESPACE_FD = 3  # the first that an OCI runtime hands on
_MAIN = f"{APP}/sandbox/pid1/__main__.py"
_CANNOT_START, _TIMED_OUT = -1001, -1002
_UNHEALTHY = re.compile(r"^unhealthy (.+)$", re.MULTILINE)
_ENDED = re.compile(r"^ended (-?\d{1,9}) (\d{1,9}) (\d{1,9}) (\d{1,12})$", re.MULTILINE)


def command_arguments(
    command: Command, hardening: Hardening, uids: UidPair, user: tuple[int, int]
) -> tuple[str, ...]:
    """What is started as pid 1. `user`: (uid, gid) in the agent's namespace."""
    numbers = (uids.worker, CHANNEL_GID, hardening.worker_processes, _NAMESPACE_FD, *user)
    # Without `site`, and from the folder that PYTHONPATH names: a tenth of the imports of a sandbox with an agent.
    start = (PYTHON, "-P", "-S", _MAIN, CHANNEL_MOUNT)
    return (*start, *map(str, numbers), f"{command.timeout_s:.3f}", *command.programs)


@contextmanager
def request(
    folder: Path, command: Command, environment: Mapping[str, str], image_user: tuple[int, int]
) -> Iterator[int]:
    """Makes the folder. `image_user`: whom the image names, as (uid, gid). Yields a descriptor: one byte into it
    starts the command, and when it is closed, in any way, the sandbox ends. Raises OSError."""
    folder.mkdir()
    _write(folder / "command", command.argv)
    _write(folder / "environment", [f"{name}={value}" for name, value in environment.items()])
    _write(folder / "cwd", [command.cwd])
    if (check := command.healthcheck) is not None:
        times = (check.interval_s, check.timeout_s, check.start_period_s, check.start_interval_s)
        user = (0, 0) if check.as_root else image_user
        _write(folder / "healthcheck", [check.command, *map(str, (*times, check.retries, *user))])
    for number, (arguments, stdin) in enumerate(command.inputs):
        (case := folder / "cases" / str(number)).mkdir(parents=True)
        _write(case / "arguments", arguments)
        (case / "stdin").write_bytes(os.fsencode(stdin))
    os.mkfifo(folder / "go")
    for place in (folder, *folder.rglob("*")):  # whatever the umask is: pid 1 is another user for an ordinary one
        place.chmod(0o755)
    go = os.open(folder / "go", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield go
    finally:
        os.close(go)


def command_end(last_words: str) -> CommandEnd | None:
    """`last_words`: the end of what pid 1 printed. None: it does not say how the command ended."""
    if not (lines := _ENDED.findall(last_words)):
        return None
    status, left, errno, milliseconds = map(int, lines[-1])
    error = (os.strerror(errno) if errno else "it cannot be started") if status == _CANNOT_START else ""
    unhealthy = (_UNHEALTHY.findall(last_words) or [""])[-1]
    return CommandEnd(None if status == _TIMED_OUT else status, left, error, milliseconds / 1000, unhealthy)


def _write(file: Path, texts: Iterable[str]) -> None:
    file.write_bytes(b"".join(os.fsencode(text) + b"\0" for text in texts))
