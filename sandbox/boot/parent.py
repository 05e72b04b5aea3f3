"""What sandboxes are forked from: a box without a network, a task and a channel, with two processes.

    python parent.py            descriptor 3 is the keeper's line
    python parent.py --rooted   the line first brings the root of an image, with modules to import (`rooted`)

The *template* imports what pid 1 of a sandbox imports, and then waits for a byte. A rooted one first imports the
modules of the image that programs are to find imported (`preloaded`). For one byte the template forks, and the
child enters a sandbox of its own (`entering`) and becomes its pid 1; for another it waits for a child that has
ended. It does nothing else, so all children have the same addresses: what it allocates between two forks would
move theirs. The *server*, pid 1 of the box, does the rest: it gets the keeper's requests, hands each on to a
child, and learns how it ends. Neither reads a text of a model or runs code of one. Messages are JSON, one a
packet:

    → {"root": [PLACE, ...]} and descriptors                    once, if it is rooted
    ← {"ready": MODULES} or {"unfit": WHY}                      once
    → {"fork": NAME, "agent": ..., "trees": [PLACE, ...]} and descriptors     `Request`
    ← {"forked": NAME, "process": ID} and a pidfd, or {"refused": NAME, "why": TEXT}
    ← {"ended": ID, "status": WAIT_STATUS}                      as the box numbers processes
"""

import atexit
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

LINE = 3
EXIT_BROKEN = 70
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64
_TRIAL_S = 10
# Libraries that draw random numbers find out by their process' number that they were forked: so few processes of a
# sandbox have the template's.
_TEMPLATE_PID, _LOW_PIDS = "20000", 300
_NEW_PROCESSES = 0x20000000  # CLONE_NEWPID
_APP = "/opt/sandbox/app"
_OURS = f"{_APP}/sandbox/"
_ROOTED, _TEMPLATE = "--rooted", "--template"
_FORK, _WAIT = b"f", b"w"  # what the template is told
_TAKEN, _ENDED = b"+", b"-"  # what a child says when it has its request, and the template of one, with its status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox.held import Held

Become = Callable[[list[str]], int]


class Template:
    """`handed`: its end of the socket on which children get their requests. `go`: where it is told what to do."""

    def __init__(self, line: socket.socket, handed: socket.socket, go: int) -> None:
        self._line, self._handed, self._go = line, handed, go
        self._processes = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def be_rooted(self, places: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
        """Goes on in the root of these mounts, with what programs are to find imported (`rooted.exec_in_root`)."""
        from sandbox.boot.packed import PackedImports

        with PackedImports():
            from sandbox.boot.rooted import exec_in_root

        own = (LINE, self._handed.fileno(), self._go)
        for number in own:
            os.set_inheritable(number, True)
        try:
            exec_in_root([sys.executable, __file__, _TEMPLATE, *map(str, own[1:])], places, descriptors)
        except OSError as error:
            sys.exit(f"no root of its image: {error.strerror or error}")  # another try may have one

    def run(self, held: "Held | None" = None) -> Become:
        """Returns in what is forked alone, what takes the arguments of its pid 1. Ends with its server. `held`:
        what programs find imported."""
        from sandbox.boot.packed import PackedImports

        if held is not None and (why := unforkable()):
            self._give_up(why)
        with nullcontext() if held is None else _nothing_at_exit():
            with PackedImports():
                import sandbox.boot.entering  # noqa: F401 - children find it imported
                from sandbox import held as found
                from sandbox.boot.imported import imported

                become = imported(for_forks=True)
                from sandbox.boot.rehearsal import rehearse_here
                from sandbox.boot.settling import settle
            rehearse_here()
        found.python = held
        if why := unfit({0, 1, 2, LINE, self._handed.fileno(), self._go, self._processes}):
            self._give_up(why)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        settle()
        _tell(self._line, {"ready": len(sys.modules)})
        # Whatever is allocated here is freed again before the next fork.
        while told := os.read(self._go, 1):
            if told != _FORK:
                self._handed.send(b"%b%d %d" % (_ENDED, *os.waitpid(-1, 0)))
            elif self._is_forked():
                return become
        os._exit(0)

    def run_holding(self, uid: int, gid: int, path: str, modules: Sequence[str]) -> Become:
        """As `run`, with these modules, imported as that user. `path`: the value of PYTHONPATH."""
        sys.path.insert(0, _APP)
        from sandbox.boot.preloaded import Unheld, hold

        del sys.path[0]
        os.setresgid(gid, gid, 0)
        os.setresuid(uid, uid, 0)  # without capabilities meanwhile
        try:
            with chdir(os.environ["PWD"]):
                held = hold(modules, path)
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        except (Unheld, OSError) as error:
            self._give_up(str(error))
        held.set_aside()
        return self.run(held)

    def _give_up(self, why: str) -> NoReturn:
        _tell(self._line, {"unfit": why})
        os._exit(1)

    def _is_forked(self) -> bool:
        """True in the child, which is pid 1 of its processes from its first moment."""
        from sandbox.boot.entering import leave_namespaces
        from sandbox.pid1.filter import libc

        try:
            leave_namespaces(_NEW_PROCESSES)  # of children; this process stays where it is
            if (pid := os.fork()) == 0:
                return True
            self._handed.send(b"%d" % pid)
        except OSError as error:
            self._handed.send((error.strerror or "nobody knows why").encode())
        libc("setns", self._processes, _NEW_PROCESSES)
        return False

    def enter(self) -> list[str]:
        """The child gets its request, and enters its sandbox. Returns the command line of what is to run there."""
        from sandbox.boot.entering import Request, enter

        message, descriptors, _, _ = socket.recv_fds(self._handed, _MOST_BYTES, _MOST_DESCRIPTORS)
        told = json.loads(message)
        request = Request(told["fork"], told["agent"], tuple(told["trees"]), descriptors)
        process = os.pidfd_open(os.getpid())
        box_number = int(os.readlink("/proc/self"))  # of the box, whose /proc it is
        message = json.dumps({"forked": request.name, "process": box_number}).encode()
        socket.send_fds(self._line, [message], [process])
        self._handed.send(_TAKEN)
        for number in (process, self._go, self._processes):
            os.close(number)
        self._line.close()
        self._handed.close()
        return enter(request)


class Child:
    """What is forked from a template. As a context: this process ends there, however that is left. `status`: its
    exit code."""

    def __init__(self) -> None:
        self.status = EXIT_BROKEN

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> NoReturn:
        try:
            if isinstance(error, SystemExit):
                self.status = error.code if isinstance(error.code, int) else 1
            elif error is not None:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self.status)


class Server:
    """`template`: its process, as a descriptor. `handing`, `handed`: both ends of the socket on which children get
    their requests. `go`: to the template."""

    def __init__(
        self, line: socket.socket, template: int, handing: socket.socket, handed: socket.socket, go: int
    ) -> None:
        self._line, self._template, self._go = line, template, go
        self._handing, self._handed = handing, handed
        self._poll = select.epoll()
        for number in (line.fileno(), handing.fileno(), template):
            self._poll.register(number, select.EPOLLIN)
        self._under_way = ""  # the name of the one that was handed on, until a child has it
        self._child, self._is_taken = 0, False  # its process, when that is known; whether it has its request

    def serve(self) -> None:
        """Until the keeper hangs up, or the template ends."""
        while True:
            for number, _ in self._poll.poll():
                if number == self._template:
                    return
                if number == self._handing.fileno():
                    self._hear()
                elif number != self._line.fileno():  # a child has ended, and stays until the template waits for it
                    self._poll.unregister(number)
                    os.close(number)
                    os.write(self._go, _WAIT)
                elif not self._hand_on():
                    return

    def _hand_on(self) -> bool:
        """False: the keeper has hung up."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._line, _MOST_BYTES, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return False
        if not message:
            return False
        self._under_way = json.loads(message)["fork"]
        try:
            socket.send_fds(self._handing, [message], descriptors)
        finally:
            for number in descriptors:
                os.close(number)
        self._poll.modify(self._line, 0)  # one at a time
        os.write(self._go, _FORK)
        return True

    def _hear(self) -> None:
        """Which process the child is, that it has its request, or why it cannot be made; and how one has ended."""
        said = self._handing.recv(_MOST_BYTES)
        if said.startswith(_ENDED):
            pid, status = map(int, said.removeprefix(_ENDED).split())
            if self._under_way and pid == self._child:
                self._refuse("it ended before it had its request")
            _tell(self._line, {"ended": pid, "status": status})
        elif said == _TAKEN:
            self._is_taken = True
        elif said.isdigit():
            self._child = int(said)
            self._poll.register(os.pidfd_open(self._child), select.EPOLLIN)
        else:
            self._refuse(said.decode())
        if self._is_taken and self._child:  # in either order
            self._done()

    def _done(self) -> None:
        self._under_way, self._child, self._is_taken = "", 0, False
        self._poll.modify(self._line, select.EPOLLIN)

    def _refuse(self, why: str) -> None:
        """Nobody gets the request that is under way."""
        # Else the child has got it, and did nothing more. `recv_fds` would wait then, whatever flags it is given.
        if select.select([self._handed], [], [], 0)[0]:
            _, descriptors, _, _ = socket.recv_fds(self._handed, _MOST_BYTES, _MOST_DESCRIPTORS)
            for number in descriptors:
                os.close(number)
        _tell(self._line, {"refused": self._under_way, "why": why})
        self._done()


def _program(arguments: list[str], supervise: Become) -> Callable[[], int]:
    """What does as Python would with this command line, if it is one of ours; else what executes it."""
    from sandbox.pid1 import command, service

    at = next((n for n, text in enumerate(arguments) if text.startswith(_OURS)), 0)
    sys.argv[:], sys.orig_argv[:] = arguments[at:], arguments
    match arguments[at].removeprefix(_OURS):
        case "__main__.py":
            return partial(supervise, arguments[at + 1 :])
        case "pid1/__main__.py":
            return command.main
        case "pid1/service.py":
            return service.main
    return partial(os.execv, arguments[0], arguments)


def unfit(own: set[int]) -> str:
    """Why nothing may be forked from this process, by what its modules have started. Empty: all is well. `own`:
    descriptors that are no module's."""
    if len(threads := os.listdir("/proc/self/task")) > 1:
        return f"what it imports starts {len(threads) - 1} threads"
    if {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}:
        return "what it imports starts processes"
    if any(signal.getitimer(kind)[0] for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
        return "what it imports sets a timer"  # which no fork has
    with open("/proc/self/maps") as maps:
        if any(line.split()[1].startswith("rw") and line.split()[1].endswith("s") for line in maps):
            return "what it imports has memory that would be common to all"
    kept = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in own:
            try:
                kept.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:  # the one that the folder was read with
                continue
    return f"what it imports opens {', '.join(sorted(kept)[:4])}" if kept else ""


def unforkable() -> str:
    """Why what is forked from this process is not what it should be: modules may do something at each fork. Empty:
    all is well. It forks as `Template` does."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            if (grandchild := os.fork()) == 0:
                os._exit(len(os.listdir("/proc/self/task")) - 1)
            status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        finally:
            os._exit(1 if status else 0)
    poll, process = select.poll(), os.pidfd_open(child)
    poll.register(process, select.POLLIN)
    if not poll.poll(1000 * _TRIAL_S):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
    _, status = os.waitpid(child, 0)
    return "what it imports breaks what is forked" if status else ""


@contextmanager
def _nothing_at_exit() -> Iterator[None]:
    """What our modules would do at the end of Python is not to be done at a program's: our processes end without
    it. `Held` keeps the rest of Python apart."""
    register = atexit.register
    atexit.register = lambda function, *arguments, **named: function  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = register


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())


def _leave_low_numbers() -> None:
    """What this process forks next has none of the numbers that a sandbox gives first."""
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(_TEMPLATE_PID)
    except OSError:  # not every kernel has it; they are used up there, which takes a moment
        for _ in range(_LOW_PIDS):
            if (passing := os.fork()) == 0:
                os._exit(0)
            os.waitpid(passing, 0)


def _template(line: socket.socket) -> Template | None:
    """Forks the template. None: in the server, when the keeper has hung up, or the template has ended."""
    root: tuple[list[str], list[int]] | None = None
    if _ROOTED in sys.argv:
        message, descriptors, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_DESCRIPTORS)
        root = json.loads(message)["root"], descriptors
    handing, handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    going, go = os.pipe()
    _leave_low_numbers()
    if (template := os.fork()) == 0:
        handing.close()
        os.close(go)
        made = Template(line, handed, going)
        if root is not None:
            made.be_rooted(*root)
        return made
    for number in [] if root is None else root[1]:
        os.close(number)
    os.close(going)
    template_there = os.pidfd_open(template)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the template ends, or what loses its parent
    Server(line, template_there, handing, handed, go).serve()
    return None


def main() -> int:
    """0: the server has ended. Pid 1's work is called from here, as deep as from `sandbox.__main__` where nothing
    is forked: a model's code sees how much of the recursion limit is left.
    """
    line = socket.socket(fileno=LINE)
    made: Template | None
    if sys.argv[1:2] == [_TEMPLATE]:
        inner, wake, uid, gid = map(int, sys.argv[2:6])
        made = Template(line, socket.socket(fileno=inner), wake)
        become = made.run_holding(uid, gid, sys.argv[6], sys.argv[7:])
    elif (made := _template(line)) is None:
        return 0
    else:
        become = made.run()
    with Child() as child:
        program = _program(made.enter(), become)
        child.status = program()
    raise AssertionError("it ends there")


if __name__ == "__main__":
    sys.exit(main())
