"""Pid 1 of a sandbox without an agent, in which one command is run: what grades. It is started for every grade,
and imports as few modules as it can: `posix` is what `os` is made of.

    FOLDER WORKER_UID CHANNEL_GID PROCESSES NAMESPACE UID GID SECONDS [PROGRAM]

FOLDER is the orchestrator's, and only this process can reach it. It holds `command`, `cwd` and `environment`
(texts that NUL bytes end), and `go`, a pipe: one byte from it starts the command, and when it hangs up all ends.
Where there are `cases`, folders 0, 1 ... with `arguments` and `stdin`, the command is run once for each. PROGRAM:
a file that is made executable first. The numbers are as in `boot.arguments`. Where there is a `healthcheck` (its
command, four times in seconds, its retries, a uid and a gid), it is run before, and what it left running goes on.

In LOGS, `test-stdout.txt` and `test-stderr.txt` get the ends of what the command prints; of each case `outputs`
gets a line with its number, how it ended and how many bytes, which follow. The last line of this process' own
output says how all ended: see `main`.
"""

import posix
import resource
import select
import sys
import time
from _stat import S_ISDIR

from sandbox.pid1.users import enter, kill_everything_of, stay, take_identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

LOGS = "/logs/verifier"
_FOLDERS = ("/logs", LOGS, "/logs/agent", "/logs/artifacts")
_TAIL_BYTES = 64 << 10  # of each stream
_CASE_BYTES = 1 << 20  # of what a case prints; what is longer is wrong
_PIECE_BYTES = 64 << 10
_REAP_S = 1.0  # orphans that have ended count as processes until somebody asks for them
_KILL_S = 10.0
_NEW = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
EXIT_NO_ORCHESTRATOR = 72
CANNOT_START, TIMED_OUT, TOO_LONG = -1001, -1002, -1003  # in the place of an exit code, or of a signal below 0


class CannotStart(Exception):
    """`errno`: why; 0: nobody knows."""

    def __init__(self, errno: int) -> None:
        super().__init__(errno)
        self.errno = errno


class Command:
    """Runs it, as a user of the agent's namespace. `seconds`: of each run."""

    def __init__(self, folder: str, numbers: "list[int]", seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._worker, self._channel_gid, self._processes, self._namespace, self._uid, self._gid = numbers
        self._proc = posix.open("/proc", posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        self._go = posix.open(f"{folder}/go", posix.O_RDONLY | posix.O_CLOEXEC)
        self._argv, self._environment = texts(f"{folder}/command"), texts(f"{folder}/environment")
        (self._cwd,) = texts(f"{folder}/cwd")
        self.unhealthy, self.begun = "", time.monotonic()

    def run(self, program: "list[str]") -> "tuple[int, int]":
        """(how it ended, processes that it left running). Raises CannotStart."""
        if not posix.read(self._go, 1):
            posix._exit(EXIT_NO_ORCHESTRATOR)
        failed, tell_failed = posix.pipe()
        self._wait(self._fork(lambda: _make_places(program, self._cwd), tell_failed), [])
        posix.close(tell_failed)
        demand_nothing(failed)
        if "healthcheck" in posix.listdir(self._folder):
            self.unhealthy = self._why_unhealthy(f"{self._folder}/healthcheck")
        before, self.begun = self._others(), time.monotonic()
        cases = f"{self._folder}/cases"
        if is_folder(cases):
            with open(posix.open(f"{LOGS}/outputs", _NEW, 0o644), "wb") as outputs:
                for number in range(len(posix.listdir(cases))):
                    self._run_case(f"{cases}/{number}", number, outputs.write)
            return 0, 0
        streams = [Tail(posix.open(f"{LOGS}/test-{name}.txt", _NEW, 0o644)) for name in ("stdout", "stderr")]
        status = self._run(self._argv, "/dev/null", streams, (self._uid, self._gid))
        left = len(set(self._others()) - set(before))
        for stream in streams:
            stream.write()
        return status, left

    def _why_unhealthy(self, file: str) -> str:
        """Empty: the healthcheck has succeeded."""
        import os  # most tasks have no healthcheck

        from sandbox.pid1.healthcheck import HEALTHY, UNHEALTHY, begin

        healthcheck, readable = begin(texts(file), self._cwd, self._variables, self._fork)
        words = self._read_all(readable, healthcheck.longest_s + _KILL_S)
        if words == HEALTHY:
            return ""
        if words.startswith(UNHEALTHY):
            return words.removeprefix(UNHEALTHY).decode("utf-8", "replace")
        return (
            f"its healthcheck cannot be run: {os.strerror(int(words)) if words.isdigit() else 'nobody knows why'}"
        )

    def _variables(self) -> "dict[bytes, bytes]":
        return dict(entry.split(b"=", 1) for entry in self._environment)

    def _read_all(self, readable: int, seconds: float) -> bytes:
        """What comes through the pipe until its end, or until the time is over."""
        poll, until, words = select.poll(), time.monotonic() + seconds, b""
        for descriptor in (readable, self._go):
            poll.register(descriptor, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * min(left_s, _REAP_S))}
            if self._go in ready:
                posix._exit(EXIT_NO_ORCHESTRATOR)
            reap()
            if readable in ready:
                if not (piece := posix.read(readable, _PIECE_BYTES)):
                    break
                words += piece
        posix.close(readable)
        return words

    def _run_case(self, case: str, number: int, write: "Callable[[bytes], object]") -> None:
        out, rest = _Head(), _Head()
        try:
            status = self._run([*self._argv, *texts(f"{case}/arguments")], f"{case}/stdin", [out, rest])
        except CannotStart:
            status = CANNOT_START
        self._kill_others()
        if len(out.content) > _CASE_BYTES:
            status, out.content = TOO_LONG, b""
        write(b"%d %d %d\n" % (number, status, len(out.content)) + out.content)

    def _run(
        self, argv: "list[bytes]", stdin: str, streams: "Sequence[_Stream]", owner: "tuple[int, int]" = (0, 0)
    ) -> int:
        """How it ended. `streams` take what it prints. `owner`: of LOGS from now on. Raises CannotStart."""
        execute = _execute(argv[0])
        given = posix.open(stdin, posix.O_RDONLY)  # here: nobody else can reach it
        pipes = [posix.pipe() for _ in streams]
        failed, tell_failed = posix.pipe()

        def start() -> int:
            posix.setsid()
            posix.chown(LOGS, *owner)
            posix.chmod(LOGS, 0o755)
            for target, source in enumerate((given, *(writable for _, writable in pipes))):
                posix.dup2(source, target)
            stay(self._uid, self._gid)
            posix.chdir(self._cwd)
            execute(argv[0], argv, self._variables())

        child = self._fork(start, tell_failed)
        for descriptor in (given, tell_failed, *(writable for _, writable in pipes)):
            posix.close(descriptor)
        for (readable, _), stream in zip(pipes, streams, strict=True):
            posix.set_blocking(readable, False)
            stream.readable = readable
        status = self._wait(child, streams)
        for stream in streams:
            stream.read()
            posix.close(stream.readable)
        demand_nothing(failed)
        return status

    def _fork(self, main: "Callable[[], int]", tell_failed: int) -> int:
        """A child that is root of the agent's namespace. Into `tell_failed` it writes the errno if it fails."""
        pid = posix.fork()
        if pid == 0:
            status = 1
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_NPROC, (self._processes, self._processes))
                posix.umask(0o022)
                take_identity(self._worker, self._worker)
                enter(self._namespace)
                status = main()
            except BaseException as error:
                posix.write(tell_failed, b"%d" % (getattr(error, "errno", None) or 0))
            finally:
                posix._exit(status)
        return pid

    def _wait(self, child: int, streams: "Sequence[_Stream]") -> int:
        """How the child ended; TIMED_OUT: it has not. The streams are read meanwhile."""
        ended, until = posix.pidfd_open(child), time.monotonic() + self._seconds
        poll = select.poll()
        open_streams = {stream.readable: stream for stream in streams}
        for descriptor in (ended, self._go, *open_streams):
            poll.register(descriptor, select.POLLIN)
        status = None
        while status is None:
            left_s = until - time.monotonic()
            ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(left_s, _REAP_S)))}
            if self._go in ready:
                posix._exit(EXIT_NO_ORCHESTRATOR)
            for descriptor in ready & set(open_streams):
                if not open_streams[descriptor].read():
                    poll.unregister(descriptor)
                    del open_streams[descriptor]
            status = reap().get(child, TIMED_OUT if left_s <= 0 else None)
        posix.close(ended)
        return status

    def _others(self) -> "list[str]":
        """Processes beside this one."""
        reap()
        return [entry for entry in posix.listdir(self._proc) if entry.isdecimal() and entry != "1"]

    def _kill_others(self) -> None:
        """Whatever a case left running. Ends this process, and so the sandbox, if it cannot."""
        deadline = time.monotonic() + _KILL_S
        while self._others():
            if time.monotonic() > deadline:
                posix._exit(1)
            killer = posix.fork()
            if killer == 0:
                kill_everything_of(self._worker, self._channel_gid)
            posix.waitpid(killer, 0)


class _Stream:
    """What a program prints. `readable`: the end of its pipe, which does not block."""

    readable = -1

    def read(self) -> bool:
        """All that is there now, but no more than some pieces. False: nobody can write any more."""
        for _ in range(16):
            try:
                piece = posix.read(self.readable, _PIECE_BYTES)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.take(piece)
        return True

    def take(self, piece: bytes) -> None:
        raise NotImplementedError


class Tail(_Stream):
    """Keeps the end, for a file. `file` -1: for nobody."""

    def __init__(self, file: int) -> None:
        self._file, self.content = file, b""

    def take(self, piece: bytes) -> None:
        self.content = (self.content + piece)[-_TAIL_BYTES:]

    def write(self) -> None:
        with open(self._file, "wb") as file:
            file.write(self.content)


class _Head(_Stream):
    """Keeps the beginning, and enough to see that there was more."""

    def __init__(self) -> None:
        self.content = b""

    def take(self, piece: bytes) -> None:
        self.content = (self.content + piece)[: _CASE_BYTES + 1]


def _make_places(program: "list[str]", cwd: bytes) -> int:
    """Where graders leave what they find, for everybody, a program that can be run, and the working directory,
    which the agent's sandbox made too."""
    way = b""
    for part in filter(None, cwd.split(b"/")):
        way += b"/" + part
        if not is_folder(way):
            posix.mkdir(way)
    for folder in _FOLDERS:
        if not is_folder(folder):
            posix.mkdir(folder)
        posix.chmod(folder, 0o777)
    for name in posix.listdir(LOGS):  # of a state that was kept whole
        if name.startswith(("test-std", "reward.")) or name == "outputs":
            posix.unlink(f"{LOGS}/{name}")
    for file in program:
        posix.chmod(file, 0o755)
    return 0


def demand_nothing(failed: int) -> None:
    """Returns when nobody can write any more: a child has ended, or become another program. Raises CannotStart if
    it has said why it failed."""
    why = posix.read(failed, 16)
    posix.close(failed)
    if why:
        raise CannotStart(int(why))


def reap() -> "dict[int, int]":
    """How each child ended that has: its exit code, or minus the signal's number."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = posix.waitpid(-1, posix.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = posix.waitstatus_to_exitcode(status)


def texts(file: str) -> "list[bytes]":
    with open(file, "rb") as opened:
        return opened.read().split(b"\0")[:-1]


def is_folder(path: "str | bytes") -> bool:
    try:
        return S_ISDIR(posix.stat(path).st_mode)
    except OSError:
        return False


def _execute(program: bytes) -> "Callable[[bytes, list[bytes], dict[bytes, bytes]], NoReturn]":
    """What becomes this program. Only one without a folder is looked for."""
    if b"/" in program:
        return posix.execve
    from os import execvpe

    return execvpe


def main() -> "NoReturn":
    """Prints why its healthcheck failed, if it did; how it ended, processes left running, errno, milliseconds."""
    folder, *numbers, seconds = sys.argv[1:9]
    command = Command(folder, [int(number) for number in numbers], float(seconds))
    errno = 0
    try:
        status, left = command.run(sys.argv[9:])
    except CannotStart as error:
        status, left, errno = CANNOT_START, 0, error.errno
    if command.unhealthy:
        print("unhealthy", " ".join(command.unhealthy.split()))
    print("ended", status, left, errno, round(1000 * (time.monotonic() - command.begun)), flush=True)
    posix._exit(0)  # nothing is left to clear away, which would take an eighth of this process' CPU
