"""The processes of a run. Each is started again when it ends before its work is done, however it ended."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

STOP_S = 30.0
MOST_STARTS = 8  # until its work is done; then something is wrong that a new start does not mend
STILL_S = 900.0  # without a change on disk: longer than a rollout or a minibatch takes on a slow machine
MOST_STALLS = 3
HOPELESS = 2  # the exit code of wrong usage, and of a trainer whose batches are of no use: no new start mends it
_PR_SET_PDEATHSIG = 1


class Broken(Exception):
    """A process does not do its work. One line for the user, with the end of its log."""


class Process:
    """One command, restarted as often as needed. Its output goes to a log; it ends with this process."""

    def __init__(self, log: Path, module: str, *words: object) -> None:
        """`module`: of this environment's Python."""
        self.name, self.log = log.stem, log
        self.starts = 0
        self._command = [sys.executable, "-m", module, *map(str, words)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises Broken where it has been started too often."""
        self.starts += 1
        if self.starts > MOST_STARTS:
            raise Broken(self.why(f"ended {MOST_STARTS} times"))
        with self.log.open("ab") as log:
            self._process = self._opened(log)

    def _opened(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C reaches this program alone, which ends the others in order.
        return subprocess.Popen(  # noqa: S603 - our own modules
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )

    def keep(self) -> None:
        """Starts it if it does not run. Raises Broken where that is hopeless."""
        if self.code() == HOPELESS:
            raise Broken(self.why("gave up"))
        if self.code() is not None or self._process is None:
            self.start()

    def code(self) -> int | None:
        """None while it runs, or before its start; below 0: the signal that ended it, also where the process ended
        itself in order and tells 128 + n."""
        code = None if self._process is None else self._process.poll()
        return code if code is None or code < 128 else 128 - code

    def stop(self) -> None:
        """Ends it, by force after a while. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def why(self, what: str) -> str:
        """What the user is told about it: one line, with the last of its log."""
        lines = self.log.read_text("utf-8", "replace").strip().splitlines() if self.log.exists() else []
        return f"{self.name} {what}: {lines[-1] if lines else 'it said nothing'} ({self.log})"


class Patience:
    """With work that shows on disk: a process may live and do nothing. Then the work is begun anew."""

    def __init__(self, *places: Path) -> None:
        """`places`: files that grow, and folders that get files, while something is done."""
        self._places = places
        self._seen, self._since = self._state(), time.monotonic()
        self._stalls = 0

    def is_over(self, doing: Process) -> bool:
        """Whether nothing has changed for STILL_S. Raises Broken, which tells of `doing`, at the last time."""
        if (state := self._state()) != self._seen:
            self._seen, self._since = state, time.monotonic()
        if time.monotonic() - self._since < STILL_S:
            return False
        self._since = time.monotonic()
        self._stalls += 1
        if self._stalls == MOST_STALLS:
            raise Broken(doing.why(f"did nothing for {STILL_S / 60:.0f} minutes, {MOST_STALLS} times"))
        return True

    def _state(self) -> list[tuple[int, int]]:
        found = [place.stat() for place in self._places if place.exists()]
        return [(stat.st_size, stat.st_mtime_ns) for stat in found]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the folder. Raises Broken where another process does."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Broken(f"another process learns in {folder}; end it, or name another --folder") from error
        yield


def end_with_parent() -> partial[None]:
    """For `preexec_fn`. SIGKILL: what it was doing is gone on with by the next start, as after any other end."""
    return partial(_end_with, os.getpid())


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was asked for: no signal comes any more
        os._exit(1)
