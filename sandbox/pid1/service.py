"""Pid 1 of a sandbox in which one program serves others: a database beside an agent.

    FOLDER WORKER_UID CHANNEL_GID PROCESSES NAMESPACE UID GID SECONDS

As `command` has it, but for what follows. The program has no limit of time. `folders`: made first, for everybody,
and `volumes`. From `go` come lines once the program was started: a number asks for `checks/NUMBER`, which is as a
healthcheck, and `log` for the end of what was printed. Into the pipe `said` go the answers: a line with the
number, how many bytes follow, and these, which are as a healthcheck's report; for the log the number is 0. When
the program has ended, its log is said, and all ends."""

import os
import posix
import select
import sys
import time

from sandbox.pid1.command import (
    CANNOT_START,
    EXIT_NO_ORCHESTRATOR,
    CannotStart,
    Command,
    Tail,
    demand_nothing,
    is_folder,
    reap,
    texts,
)
from sandbox.pid1.healthcheck import begin
from sandbox.pid1.users import stay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


_LOG_BYTES = 48 << 10  # a pipe takes it, whoever reads
_LINE_BYTES = 4096
_LOOK_MS = 1000  # orphans that have ended count as processes until somebody asks for them
LOG = 0


class Service(Command):
    """The program, and what is run beside it."""

    def __init__(self, folder: str, numbers: "list[int]") -> None:
        super().__init__(folder, numbers, 0.0)
        self._said = posix.open(f"{folder}/said", posix.O_WRONLY | posix.O_CLOEXEC)
        self._output = Tail(-1)
        self._checks: dict[int, tuple[int, bytes]] = {}  # by their pipes: number, report so far

    def serve(self) -> "tuple[int, int]":
        """(how the program ended, processes that it left running). Raises CannotStart."""
        if not posix.read(self._go, 1):
            posix._exit(EXIT_NO_ORCHESTRATOR)
        self._make_folders()
        before, self.begun = self._others(), time.monotonic()
        child = self._started()
        status, received, open_output = None, b"", True
        poll = select.poll()
        ended = posix.pidfd_open(child)
        for descriptor in (ended, self._go, self._output.readable):
            poll.register(descriptor, select.POLLIN)
        while status is None:
            ready = {descriptor for descriptor, _ in poll.poll(_LOOK_MS)}
            if self._go in ready:
                piece = posix.read(self._go, _LINE_BYTES)
                if not piece:
                    posix._exit(EXIT_NO_ORCHESTRATOR)
                *lines, received = (received + piece).split(b"\n")
                for line in lines:
                    self._told(line, poll)
            if open_output and self._output.readable in ready and not self._output.read():
                poll.unregister(self._output.readable)
                open_output = False
            for pipe in ready & set(self._checks):
                self._read_report(pipe, poll)
            status = reap().get(child)
        self._output.read()
        self._say_log()
        return status, len(set(self._others()) - set(before))

    def _make_folders(self) -> None:
        failed, tell_failed = posix.pipe()
        open_to_all = texts(f"{self._folder}/folders")  # here: nobody else can reach it
        folders = (self._cwd, *open_to_all, *texts(f"{self._folder}/volumes"))

        def make() -> int:
            for folder in folders:
                way = b""
                for part in filter(None, folder.split(b"/")):
                    way += b"/" + part
                    if not is_folder(way):
                        posix.mkdir(way)
                        posix.chmod(way, 0o755)
                if folder in open_to_all:
                    posix.chmod(folder, 0o1777)
            return 0

        self._fork(make, tell_failed)
        posix.close(tell_failed)
        demand_nothing(failed)

    def _started(self) -> int:
        """The program's process. Raises CannotStart."""
        self._output.readable, writable = posix.pipe()
        failed, tell_failed = posix.pipe()
        null = posix.open("/dev/null", posix.O_RDONLY)

        def start() -> int:
            posix.setsid()
            for target, source in enumerate((null, writable, writable)):
                posix.dup2(source, target)
            stay(self._uid, self._gid)
            posix.chdir(self._cwd)
            os.execvpe(self._argv[0], self._argv, self._variables())  # noqa: S606 - no shell is wanted

        child = self._fork(start, tell_failed)
        for descriptor in (null, writable, tell_failed):
            posix.close(descriptor)
        posix.set_blocking(self._output.readable, False)
        demand_nothing(failed)
        return child

    def _told(self, line: bytes, poll: "select.poll") -> None:
        if not line.isdigit():
            self._output.read()
            self._say_log()
            return
        words = texts(f"{self._folder}/checks/{line.decode()}")
        _, readable = begin(words, self._cwd, self._variables, self._fork)
        self._checks[readable] = int(line), b""
        poll.register(readable, select.POLLIN)

    def _read_report(self, pipe: int, poll: "select.poll") -> None:
        number, report = self._checks[pipe]
        if piece := posix.read(pipe, _LINE_BYTES):
            self._checks[pipe] = number, (report + piece)[-_LINE_BYTES:]
            return
        poll.unregister(pipe)
        posix.close(pipe)
        del self._checks[pipe]
        self._say(number, report)

    def _say_log(self) -> None:
        self._say(LOG, self._output.content[-_LOG_BYTES:])

    def _say(self, number: int, content: bytes) -> None:
        left = b"%d %d\n" % (number, len(content)) + content
        while left:
            left = left[posix.write(self._said, left) :]


def main() -> "NoReturn":
    """Prints how it ended, as `command.main` does."""
    folder, *numbers = sys.argv[1:8]
    service = Service(folder, [int(number) for number in numbers])
    errno = 0
    try:
        status, left = service.serve()
    except CannotStart as error:
        status, left, errno = CANNOT_START, 0, error.errno
    print("ended", status, left, errno, round(1000 * (time.monotonic() - service.begun)), flush=True)
    posix._exit(0)


if __name__ == "__main__":
    main()
