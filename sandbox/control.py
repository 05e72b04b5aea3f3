"""The line between pid 1 and the runner: requests for a fresh worker, for its files or for a healthcheck, news of
its end.

One message per packet; news is JSON. A fresh worker's pipes travel with the message that announces it.
The runner inherits the line by fork; the worker closes its copy at its start.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.v1 import sandbox_pb2 as pb

_MAX_MESSAGE_BYTES = 4096
_MAX_REQUEST_BYTES = 192 << 10  # a healthcheck and its variables have at most 112 KiB
_REPLACE = b"replace"
_COLLECT = b"collect "  # and the limits
_CHECK = b"check "  # and an assignment that says what and where


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A fresh worker, with the runner's ends of its pipes."""

    number: int
    commands: int
    frames: int
    output: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker ended by itself. `status`: exit code, or minus the signal that killed it."""

    number: int
    status: int


@dataclass(frozen=True, slots=True)
class OutputBegun:
    """The worker is dead, and its files come through this pipe."""

    pipe: int


@dataclass(frozen=True, slots=True)
class CheckBegun:
    """The healthcheck is run, and what came of it comes through this pipe."""

    pipe: int


class ControlLost(Exception):
    """The other end is gone."""


def control_line() -> tuple[SupervisorEnd, RunnerEnd]:
    """Both ends; each process closes the other's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return SupervisorEnd(ours), RunnerEnd(theirs)


class _End:
    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def fileno(self) -> int:
        return self._line.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._line.close()

    def _send(self, message: bytes, pipes: Sequence[int] = ()) -> None:
        """Raises ControlLost, as all that use it do."""
        try:
            if pipes:
                socket.send_fds(self._line, [message], pipes)
            else:
                self._line.send(message)
        except OSError as error:
            raise ControlLost from error


class SupervisorEnd(_End):
    def request(self) -> pb.OutputLimits | pb.Assignment | None:
        """Reads one request: for files, for a healthcheck; None: for a fresh worker. Raises ControlLost."""
        request = self._line.recv(_MAX_REQUEST_BYTES)
        if not request:
            raise ControlLost
        if request == _REPLACE:
            return None
        if request.startswith(_CHECK):
            return pb.Assignment.FromString(request.removeprefix(_CHECK))
        return pb.OutputLimits.FromString(request.removeprefix(_COLLECT))

    def announce_start(self, number: int, pipes: Sequence[int]) -> None:
        """Hands over the runner's ends of the pipes: commands, frames, output."""
        self._send(json.dumps({"started": number}).encode(), pipes)

    def announce_output(self, pipe: int) -> None:
        """Hands over the pipe the files come through."""
        self._send(json.dumps({"output": True}).encode(), [pipe])

    def announce_check(self, pipe: int) -> None:
        """Hands over the pipe through which the healthcheck says what came of it."""
        self._send(json.dumps({"check": True}).encode(), [pipe])

    def announce_end(self, number: int, status: int) -> None:
        self._send(json.dumps({"ended": number, "status": status}).encode())


class RunnerEnd(_End):
    def ask_for_replacement(self) -> None:
        """Pid 1 kills all that is left of the worker and starts a fresh one."""
        self._send(_REPLACE)

    def ask_for_output(self, limits: pb.OutputLimits) -> None:
        """Pid 1 kills all that is left of the worker and sends its files."""
        self._send(_COLLECT + limits.SerializeToString())

    def ask_for_healthcheck(self, assignment: pb.Assignment) -> None:
        """Pid 1 has the healthcheck run, beside the worker. Of the assignment it, the working directory and the
        variables are read."""
        self._send(_CHECK + assignment.SerializeToString())

    def receive(self) -> WorkerStarted | WorkerEnded | OutputBegun | CheckBegun:
        """The next piece of news. Raises ControlLost."""
        try:
            message, fds, _, _ = socket.recv_fds(self._line, _MAX_MESSAGE_BYTES, 3)
        except OSError as error:
            raise ControlLost from error
        if not message:
            raise ControlLost
        news = json.loads(message)
        if "ended" in news:
            return WorkerEnded(news["ended"], news["status"])
        if "output" in news:
            return OutputBegun(fds[0])
        if "check" in news:
            return CheckBegun(fds[0])
        commands, frames, output = fds
        return WorkerStarted(news["started"], commands, frames, output)
