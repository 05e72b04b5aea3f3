"""Pid 1: forks the runner and the code workers, wipes workers, reaps, ends with the runner or the orchestrator.

Single-threaded; imports everything once so that its children share it; holds no task data, opens no
channel. It has no CAP_KILL: a worker's processes are killed by a child whose effective uid is the
worker's. Where all run as one user, pid 1 kills its own descendants, except the runner.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.control import ControlLost, RunnerEnd, SupervisorEnd, control_line
from sandbox.pid1 import identity, users
from sandbox.pid1.confinement import confinement, cpu_millis
from sandbox.pid1.filter import libc
from sandbox.pid1.outbox import write_output
from sandbox.pid1.worker_setup import clean_process, place_pipes
from sandbox.procfs import Processes
from sandbox.types import OUTPUT_FOLDER, Box, Identities
from sandbox.worker.worker import EXIT_BROKEN, Worker, settle

WIPE_LIMIT_S = 20.0  # on a crowded machine even a killed process takes seconds to end
EXIT_CANNOT_WIPE = 71
EXIT_NO_ORCHESTRATOR = 72
_WIPE_PAUSE_S = 0.005
_KILLER_LIMIT_S = 0.2
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SET_BYTES, _SIGNAL_BYTES, _MOST_SIGNALS = 128, 128, 32  # sigset_t; signalfd_siginfo, which begins with the number
_OUTPUT_MODE = 0o622  # the pipe is root's, and the worker may open it by name, as /dev/stdout

RunnerMain = Callable[[Box, RunnerEnd, pb.Confinement], int]


class TetherLost(Exception):
    """There is no orchestrator."""


def tether(path: Path) -> socket.socket:
    """A connection that poll() finds readable when the orchestrator is gone. No child may keep it open. Raises
    TetherLost."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(path))
    except OSError as error:
        line.close()
        raise TetherLost(f"no orchestrator holds this sandbox at {path}: {error.strerror}") from error
    return line


def import_only_from(folder: str) -> None:
    """From here on modules come from `folder` alone: an agent that is root may write modules anywhere else."""
    inside = f"{folder}/"
    sys.path[:] = [path for path in sys.path if path.startswith(inside)]
    for module in list(sys.modules.values()):
        names = object.__getattribute__(module, "__dict__")  # `vars` would load what is loaded when it is used
        if "__path__" in names:
            names["__path__"] = [path for path in names["__path__"] if path.startswith(inside)]


class Supervisor:
    """`run` may be called once."""

    def __init__(self, box: Box, runner_main: RunnerMain) -> None:
        self._box = box
        self._runner_main = runner_main
        self._processes = Processes()
        self._confinement = confinement(box.identities)
        self._cpu_millis = cpu_millis()
        self._runner = 0
        self._runner_status: int | None = None
        self._worker = 0
        self._killers: set[int] = set()  # they kill whatever runs as the worker when their turn comes
        self._number = 0
        self._terminated_by: int | None = None
        self._control: SupervisorEnd
        self._tether: socket.socket
        self._signals = -1

    def run(self) -> int:
        """Serves until the runner or the orchestrator ends, or a signal comes; returns this process' exit code.

        When this process ends first, the kernel kills the runner.
        """
        identity.become_supervisor()
        try:
            self._tether = tether(self._box.tether)
        except TetherLost as error:
            print(error, file=sys.stderr, flush=True)
            return EXIT_NO_ORCHESTRATOR
        self._signals = _caught_signals()
        # The collector skips all objects made so far: looking at them would copy the pages shared by fork.
        gc.freeze()
        self._control, theirs = control_line()
        self._runner = self._fork(lambda: self._be_runner(theirs))
        theirs.close()
        try:
            self._serve()
        except ControlLost:  # the runner has closed its line and is about to end
            while self._runner_status is None and self._terminated_by is None:
                self._await_signal(None)
                self._reap()
        except TetherLost as error:
            print(error, file=sys.stderr, flush=True)
            return EXIT_NO_ORCHESTRATOR
        finally:
            # A real pid 1 that a signal ends takes everything with it at once: an agent that saw its worker
            # wiped first could still act on that.
            if self._terminated_by is None or os.getpid() != 1:
                self._wipe()
        if self._terminated_by is not None:
            return 128 + self._terminated_by
        status = self._runner_status
        return 1 if status is None else status if status >= 0 else 128 - status

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        poll.register(self._tether, select.POLLIN)
        while self._runner_status is None and self._terminated_by is None:
            ready = [fd for fd, _ in poll.poll()]
            if self._tether.fileno() in ready:
                raise TetherLost("the orchestrator is gone")
            if self._signals in ready:
                self._take_signals()
                self._reap()
            if self._control.fileno() in ready:
                match self._control.request():
                    case None:
                        self._replace_worker()
                    case pb.Assignment() as assignment:
                        self._check(assignment)
                    case limits:
                        self._collect_output(limits)

    # ------------------------------------------------------------ processes

    def _replace_worker(self) -> None:
        self._worker = 0  # its end is not announced any more
        self._wipe()
        commands_in, commands_out = os.pipe()
        frames_in, frames_out = os.pipe()
        output_in, output_out = os.pipe()
        with contextlib.suppress(OSError):  # gVisor's pipes have no modes
            os.fchmod(output_out, _OUTPUT_MODE)
        self._number += 1
        self._worker = self._fork(lambda: self._be_worker(commands_in, frames_out, output_out))
        self._control.announce_start(self._number, (commands_out, frames_in, output_in))
        for fd in (commands_in, commands_out, frames_in, frames_out, output_in, output_out):
            os.close(fd)

    def _collect_output(self, limits: pb.OutputLimits) -> None:
        self._worker = 0
        self._wipe()
        readable, writable = os.pipe()
        self._fork(lambda: self._be_collector(writable, limits))
        self._control.announce_output(readable)
        os.close(readable)
        os.close(writable)

    def _check(self, assignment: pb.Assignment) -> None:
        """Has a healthcheck run. The worker waits meanwhile."""
        readable, writable = os.pipe()
        self._fork(lambda: self._be_checker(assignment, writable))
        self._control.announce_check(readable)
        os.close(readable)
        os.close(writable)

    def _be_checker(self, assignment: pb.Assignment, report: int) -> int:
        from sandbox.pid1.healthcheck import UNHEALTHY, Healthcheck, check

        # It lives as long as the services that it started.
        self._control.close()
        self._tether.close()
        box, told = self._box, assignment.healthcheck
        if told.as_root and box.agent is not None:
            box = replace(box, agent=replace(box.agent, uid=0, gid=0))
        identity.become_worker(box)
        clean_process(box, self._cpu_millis)
        if (problem := settle(assignment.working_directory, dict(assignment.environment))) is not None:
            os.write(report, UNHEALTHY + f"the task's working directory cannot be used: {problem}".encode())
            return 0
        return check(Healthcheck.of(told), report)

    def _be_collector(self, pipe: int, limits: pb.OutputLimits) -> int:
        identity.become_worker(self._box)
        folder = self._box.workspace / OUTPUT_FOLDER
        return write_output(folder, pipe, max_files=limits.max_files, max_bytes=limits.max_bytes)

    def _be_runner(self, control: RunnerEnd) -> int:
        self._control.close()
        self._tether.close()
        identity.become_runner(self._box)
        if self._box.agent is not None:
            import_only_from(sys.prefix)
        return self._runner_main(self._box, control, self._confinement)

    def _be_worker(self, commands: int, frames: int, output: int) -> int:
        identity.become_worker(self._box)
        place_pipes(commands, frames, output)
        clean_process(self._box, self._cpu_millis)
        worker = Worker()
        try:
            worker.serve()
        except BaseException:  # model-written code broke the harness: a traceback of ours would puzzle the model
            return EXIT_BROKEN
        return 0

    def _fork(self, main: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._child(main)
        return pid

    def _child(self, main: Callable[[], int]) -> NoReturn:
        status = EXIT_BROKEN
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, *_ENDING))
            # Whoever started pid 1 may ignore some, as `nohup` does.
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = main()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            status = os.waitstatus_to_exitcode(wait_status)
            self._killers.discard(pid)
            if pid == self._runner:
                self._runner_status = status
            elif pid == self._worker:
                self._worker = 0
                with contextlib.suppress(ControlLost):  # the runner has ended, or is about to
                    self._control.announce_end(self._number, status)

    # ------------------------------------------------------------ wiping

    def _wipe(self) -> None:
        """Kills all that is left of the worker, and waits for the killers: a late one would kill the next worker.
        Ends this process, and so the sandbox, if it cannot."""
        deadline = time.monotonic() + WIPE_LIMIT_S
        while True:
            self._reap()
            alive = self._left_of_worker()
            if not alive and not self._killers:
                return
            if time.monotonic() > deadline:
                what = f"{len(alive)} processes of the code worker" if alive else f"{len(self._killers)} killers"
                print(f"{what} did not end", file=sys.stderr, flush=True)
                os._exit(EXIT_CANNOT_WIPE)
            if alive:
                self._kill(alive)
            self._await_signal(_WIPE_PAUSE_S)

    def _left_of_worker(self) -> list[int]:
        if (ours := self._box.identities) is not None and self._box.agent is not None:
            # It may have any uid of its namespace; a killer's real uid is the number of the channel's group.
            return self._processes.of_others((0, ours.runner_uid, ours.channel_gid))
        if ours is not None:
            return self._processes.of(ours.worker_uid)
        return self._processes.below(os.getpid(), but_not=self._runner)

    def _kill(self, pids: list[int]) -> None:
        """Tries once; the caller looks whether it worked."""
        if self._box.identities is not None:
            with contextlib.suppress(BlockingIOError):  # no room for another process right now
                self._kill_as_worker(self._box.identities)
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_as_worker(self, identities: Identities) -> None:
        """Kills through a child: this process never takes another identity. The worker can slow the child down, so
        after a while another is tried."""
        killer = os.fork()
        if killer == 0:
            users.kill_everything_of(identities.worker_uid, identities.channel_gid)
        self._killers.add(killer)
        deadline = time.monotonic() + _KILLER_LIMIT_S
        while killer in self._killers and time.monotonic() < deadline:
            self._await_signal(_WIPE_PAUSE_S)
            self._reap()

    # ------------------------------------------------------------ signals

    def _await_signal(self, limit_s: float | None) -> None:
        if select.select([self._signals], [], [], limit_s)[0]:
            self._take_signals()

    def _take_signals(self) -> None:
        came = os.read(self._signals, _MOST_SIGNALS * _SIGNAL_BYTES)
        for at in range(0, len(came), _SIGNAL_BYTES):
            if (number := int.from_bytes(came[at : at + 4], sys.byteorder)) in _ENDING:
                self._terminated_by = number


def _caught_signals() -> int:
    """A descriptor that signals are read from. A handler of Python's would leave an object where it interrupts, so
    that addresses in a worker would depend on when a signal came."""
    caught = (signal.SIGCHLD, *_ENDING)
    signal.pthread_sigmask(signal.SIG_BLOCK, caught)
    kinds = sum(1 << (number - 1) for number in caught).to_bytes(_SET_BYTES, sys.byteorder)
    return libc("signalfd", -1, kinds, os.O_NONBLOCK | os.O_CLOEXEC)
