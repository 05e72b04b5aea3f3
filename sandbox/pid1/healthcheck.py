"""A task's healthcheck: a command that is run until it succeeds. In a process of its own, which has become whom
the command is to run as, where it works, and with its variables.

As Harbor's, which follows Docker's: failures of runs that begin in the start period do not count, and `retries`
in a row that count end it. A run that takes too long has failed, and its process group is killed. What the command
left running goes on, and what it prints is read as long as anything can print: nothing fails for want of a reader.
"""

import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass

from sandbox.pid1.users import stay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout_api.v1 import sandbox_pb2 as pb

HEALTHY, UNHEALTHY = b"+", b"-"  # begins the report; behind the second follows why
_SHOWN_BYTES = 1000  # of what was printed last
_PIECE_BYTES = 64 << 10
_PIECES = 16
_REPORT_FD = 3  # behind the standard three


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """Times in seconds."""

    command: str
    retries: int
    interval_s: float
    timeout_s: float
    start_period_s: float
    start_interval_s: float

    @classmethod
    def of(cls, told: "pb.Healthcheck") -> "Healthcheck":
        times = (told.interval, told.timeout, told.start_period, told.start_interval)
        return cls(told.command, told.retries, *(time.ToTimedelta().total_seconds() for time in times))

    @property
    def longest_s(self) -> float:
        """That it can take."""
        first_s = self.start_period_s + self.timeout_s + self.start_interval_s
        return first_s + self.retries * (self.timeout_s + self.interval_s)


def begin(
    words: "Sequence[bytes]",
    cwd: bytes,
    variables: "Callable[[], dict[bytes, bytes]]",
    fork: "Callable[[Callable[[], int], int], int]",
) -> "tuple[Healthcheck, int]":
    """Begins a healthcheck. Returns it, and the pipe through which its report comes. `words`: its command, four
    times in seconds, its retries, a uid and a gid. `fork`: as that of `Command`."""
    command, *times, retries, uid, gid = words
    healthcheck = Healthcheck(os.fsdecode(command), int(retries), *map(float, times))
    readable, report = os.pipe()

    def start() -> int:
        os.setsid()
        stay(int(uid), int(gid))
        os.chdir(cwd)
        os.environb.clear()
        os.environb.update(variables())
        return check(healthcheck, report)

    fork(start, report)
    os.close(report)
    return healthcheck, readable


def check(healthcheck: Healthcheck, report: int) -> int:
    """Runs it, writes into the pipe `report` what came of it, and returns when nothing prints any more."""
    report = _alone_with(report)
    output = _Output()
    try:
        why = _why_unhealthy(healthcheck, output)
    except OSError as error:
        why = f"its healthcheck cannot be run: {error.strerror}"
    os.close(output.writable)
    os.write(report, HEALTHY if not why else UNHEALTHY + why.encode("utf-8", "replace"))
    os.close(report)
    output.read_on()
    return 0


def _alone_with(report: int) -> int:
    """The pipe, as all that is left of pid 1's descriptors: an agent of the same user could take hold of them."""
    null = os.open(os.devnull, os.O_RDWR)
    for target in range(_REPORT_FD):
        os.dup2(null, target)
    os.dup2(report, _REPORT_FD, inheritable=False)
    os.closerange(_REPORT_FD + 1, os.sysconf("SC_OPEN_MAX"))
    return _REPORT_FD


class _Output:
    """The pipe that takes what is printed. Its end is kept."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe()
        os.set_blocking(self.readable, False)
        self._tail = b""

    def read(self, pieces: int) -> None:
        for _ in range(pieces):
            try:
                piece = os.read(self.readable, _PIECE_BYTES)
            except BlockingIOError:
                return
            self._tail = (self._tail + piece)[-_SHOWN_BYTES:]

    def take(self) -> str:
        """The end of what was printed since the last call, in one line."""
        text, self._tail = self._tail.decode("utf-8", "replace"), b""
        return " ".join(text.split())

    def read_on(self) -> None:
        os.set_blocking(self.readable, True)
        while os.read(self.readable, _PIECE_BYTES):
            pass


def _why_unhealthy(healthcheck: Healthcheck, output: _Output) -> str:
    """Empty: it has succeeded. Raises OSError."""
    began, failures = time.monotonic(), 0
    while True:
        counts = time.monotonic() - began >= healthcheck.start_period_s
        status = _run(healthcheck, output)
        printed = output.take()
        if status == 0:
            return ""
        failures += counts
        if failures >= healthcheck.retries:
            how = f"it ended with {status}" if status is not None else f"it took over {healthcheck.timeout_s:g} s"
            words = f" and printed: {printed}" if printed else " and printed nothing"
            return f"its healthcheck failed, {failures} of {failures} times; the last time {how}{words}"
        time.sleep(healthcheck.interval_s if counts else healthcheck.start_interval_s)


def _run(healthcheck: Healthcheck, output: _Output) -> "int | None":
    """Its exit code, or minus the signal that killed it; None: it did not end in its time."""
    process = subprocess.Popen(  # noqa: S603  the task's command
        ("/bin/sh", "-c", healthcheck.command),
        stdin=subprocess.DEVNULL,
        stdout=output.writable,
        stderr=output.writable,
        start_new_session=True,
    )
    ended, until = os.pidfd_open(process.pid), time.monotonic() + healthcheck.timeout_s
    poll = select.poll()
    for descriptor in (ended, output.readable):
        poll.register(descriptor, select.POLLIN)
    has_ended = False
    while not has_ended and (left_s := until - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * left_s)}
        has_ended = ended in ready
        if output.readable in ready:
            output.read(1)
    os.close(ended)
    if not has_ended:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    output.read(_PIECES)
    return status if has_ended else None
