"""The commands of a shell agent: each in a shell of its own, with the worker's rights.

A shell that lived on would carry what a command did to it (`exec`, `set -e`, a closed output, a kill) into the
next one. So only what people expect to stay is handed on: the working directory and exported variables. The shell
writes them at its end; one that is killed, or replaced by `exec`, leaves them as they were.
"""

import os
import shutil
import signal
import subprocess
from typing import Any

_STATE_FD = 9  # plain shells take one digit
_MAX_STATE_BYTES = 100_000  # it comes back as one argument, and an argument has at most 128 KiB
# $1: the command, $2: what the one before exported, its working directory included.
_SCRIPT = f"""\
eval "$2"; set -- "$1" "${{OLDPWD-}}"; cd -- "$PWD" && OLDPWD=$2 || cd /; \
trap 'export PWD; export -p >&{_STATE_FD}' EXIT; eval "$1"\
"""


class Shell:
    """`program` None: the image has none."""

    def __init__(self) -> None:
        self.program = shutil.which("bash") or shutil.which("sh") or shutil.which("/bin/sh")
        self._state = ""

    def run(self, command: str, limit_s: float) -> dict[str, Any]:
        """`status`: exit code, or minus the signal that killed the shell; None: the time was over, and the process
        group was killed. Returns when the shell has ended: what it left in the background goes on, and may go on
        printing. Raises OSError: no process can be started."""
        assert self.program is not None
        name = os.path.basename(self.program)
        state = os.memfd_create("state")
        try:
            os.dup2(state, _STATE_FD)
            process = subprocess.Popen(  # noqa: S603  the model's command
                [name, "-c", _SCRIPT, name, command.encode("utf-8", "replace"), self._state],
                executable=self.program,
                stdin=subprocess.DEVNULL,
                env={} if self._state else None,
                pass_fds=(_STATE_FD,),
                start_new_session=True,
            )
            status: int | None = None
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            written = os.pread(state, _MAX_STATE_BYTES + 1, 0)
        finally:
            os.close(_STATE_FD)
            os.close(state)
        if 0 < len(written) <= _MAX_STATE_BYTES and b"\0" not in written:
            self._state = os.fsdecode(written)
        return {"status": status}
