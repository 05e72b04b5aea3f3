"""An agent that is a program of its own: its process, its answer.

The program and all code it runs share the worker's identity. The task is its standard input. Its answer is the
file that the variable ANSWER_FILE names, else the last line it prints, if its exit code is 0. The end of its
standard error shows people why it failed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import held
from sandbox.texts import ANSWER_CHARS

ANSWER_FILE = "answer.txt"
_MAX_ANSWER_BYTES = 4 * ANSWER_CHARS
_MAX_ERRORS_BYTES = 2 * 1024
_ERRORS_S = 1.0  # how long a child that the program left behind may keep its standard error open
_READ_BYTES = 64 * 1024
_PRELOADED = str(Path(__file__).parents[1] / "boot" / "preloaded.py")  # run as a script
_Wait = Callable[[], int]


class Program:
    """A program's process. With `modules` it is started before there is a program, and imports them meanwhile; but
    where this process comes from one that has imported modules, it is forked from this one."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self._answer_file = Path.cwd() / ANSWER_FILE
        if os.path.lexists(self._answer_file):  # the task's, and no answer
            self._answer_file = Path(tempfile.mkdtemp(), ANSWER_FILE)
        self._ours = {**environment, "ANSWER_FILE": str(self._answer_file)}
        self._environment = {**os.environ, **self._ours}
        self._stdin = tempfile.TemporaryFile()  # noqa: SIM115  standard input: empty until there is a task
        self._line, theirs = socket.socketpair()
        self._preloaded: _Process | None = None
        if modules:
            arguments = [_PRELOADED, str(theirs.fileno()), *modules]
            self._preloaded = self._start(arguments, theirs.fileno())
        theirs.close()
        if self._preloaded is not None and not self._line.recv(1):
            self._preloaded = None  # importing ended it; as a program it will end the same way, and can be heard

    def run(self, program: str, task: str, variables: Iterable[str]) -> tuple[int, str | None, str]:
        """Returns (exit code, answer, end of standard error). The worker also prints what the program prints.
        `variables`: names of the task's, which this process has. Call it once."""
        self._stdin.write(task.encode("utf-8", "replace"))
        self._stdin.seek(0)
        process = self._preloaded
        if process is None:
            process = self._start([program]) if held.python is None else self._fork(held.python, program)
        else:
            with contextlib.suppress(OSError):  # it has ended since
                names = [name for name in (*variables, "PWD") if name in os.environ and name not in self._ours]
                own = [f"{name}={os.environ[name]}" for name in names]
                self._line.sendall(os.fsencode("\0".join([program, os.getcwd(), *own])))
        self._line.close()
        self._stdin.close()
        status, output, errors = process.end(), process.tails[1], process.tails[2]
        answer = _read(self._answer_file)
        if answer is None and status == 0:
            lines = output.decode("utf-8", "surrogateescape").split("\n")
            answer = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return status, None if answer is None else answer[:ANSWER_CHARS], errors.decode("utf-8", "replace")

    def _start(self, arguments: Sequence[str], *passed: int) -> _Process:
        process = subprocess.Popen(  # noqa: S603  the operator's program
            [sys.executable, *arguments],
            stdin=self._stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            pass_fds=passed,
        )
        return _Process(process.wait, process.stdout, process.stderr)

    def _fork(self, python: held.Held, program: str) -> _Process:
        (output, printing), (errors, complaining) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            python.become(program, self._environment, (self._stdin.fileno(), printing, complaining))
        os.close(printing)
        os.close(complaining)
        return _Process(
            lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.fdopen(output), os.fdopen(errors)
        )


class _Process:
    """A process whose output is passed on to this one's. `tails`: the end of what came, by descriptor."""

    def __init__(self, wait: _Wait, output: Any, errors: Any) -> None:
        self._wait, self._output = wait, output
        self.tails = {1: b"", 2: b""}
        self._errors = threading.Thread(
            target=self._pass_on, args=(errors, 2, _MAX_ERRORS_BYTES), name="stderr", daemon=True
        )
        self._errors.start()

    def end(self) -> int:
        """Waits for it. Returns its exit code."""
        self._pass_on(self._output, 1, _MAX_ANSWER_BYTES + _READ_BYTES)
        status = self._wait()
        self._errors.join(_ERRORS_S)
        return status

    def _pass_on(self, source: Any, target: int, most: int) -> None:
        """Passes everything on, until nobody can write any more."""
        while chunk := os.read(source.fileno(), _READ_BYTES):
            _write(target, chunk)
            self.tails[target] = (self.tails[target] + chunk)[-most:]


def _read(path: Path) -> str | None:
    """A regular file's text, None where there is none. Bytes that are no UTF-8 become lone surrogates."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return file.read(_MAX_ANSWER_BYTES).decode("utf-8", "surrogateescape").strip()


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
