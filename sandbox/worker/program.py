"""An agent that is a program of its own: its files, its process, its answer.

`place` runs in the runner, which owns the files: model-written code can read but not change them. `run_program`
runs in the worker: the program and all code it runs share the worker's identity. The task is its standard input.
Its answer is the file that the variable ANSWER_FILE names, else the last line it prints, if its exit code is 0.
The end of its standard error tells people why it failed.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from sandbox.errors import EpisodeCrashed
from sandbox.texts import ANSWER_CHARS
from sandbox.types import ProgramFile

MAIN = "__main__.py"
ANSWER_FILE = "answer.txt"
_MAX_ANSWER_BYTES = 4 * ANSWER_CHARS
_MAX_ERRORS_BYTES = 2 * 1024
_ERRORS_S = 1.0  # how long a child that the program left behind may keep its standard error open
_READ_BYTES = 64 * 1024


def place(files: tuple[ProgramFile, ...]) -> Path:
    """Returns the folder to run. Raises EpisodeCrashed."""
    folder = Path(tempfile.mkdtemp(prefix="program-"))
    try:
        folder.chmod(0o755)
        for file in files:
            path = PurePosixPath(file.path)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in file.path:
                raise EpisodeCrashed(f"a file of the program cannot be called {file.path[:80]!r}")
            target = folder.joinpath(*path.parts)
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.write_bytes(file.content)
            target.chmod(0o444)
    except OSError as error:
        raise EpisodeCrashed(f"cannot place the program: {error.strerror}") from error
    return folder


def run_program(program: str, task: str, environment: Mapping[str, str]) -> tuple[int, str | None, str]:
    """Returns (exit code, answer, end of standard error). The worker also prints what the program prints."""
    answer_file = Path.cwd() / ANSWER_FILE
    with tempfile.TemporaryFile() as told:
        told.write(task.encode("utf-8", "replace"))
        told.seek(0)
        process = subprocess.Popen(  # noqa: S603  the operator's program
            [sys.executable, program],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment, "ANSWER_FILE": str(answer_file)},
        )
    assert process.stdout is not None
    assert process.stderr is not None
    printed = _Passed(process.stdout, 1, _MAX_ANSWER_BYTES + _READ_BYTES)
    errors = _Passed(process.stderr, 2, _MAX_ERRORS_BYTES)
    beside = threading.Thread(target=errors.on, name="stderr", daemon=True)
    beside.start()
    printed.on()
    status = process.wait()
    beside.join(_ERRORS_S)
    answer = _read(answer_file)
    if answer is None and status == 0:
        lines = printed.tail.decode("utf-8", "surrogateescape").split("\n")
        answer = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return status, None if answer is None else answer[:ANSWER_CHARS], errors.tail.decode("utf-8", "replace")


class _Passed:
    """What comes from a pipe and is passed to a descriptor; `tail` is its end."""

    def __init__(self, source: IO[bytes], target: int, most: int) -> None:
        self.tail = b""
        self._source, self._target, self._most = source, target, most

    def on(self) -> None:
        """Passes everything on, until nobody can write any more."""
        while chunk := os.read(self._source.fileno(), _READ_BYTES):
            _write(self._target, chunk)
            self.tail = (self.tail + chunk)[-self._most :]


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
