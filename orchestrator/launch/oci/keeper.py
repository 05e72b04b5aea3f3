"""Runs the OCI runtime for one launcher and watches the containers: a process of its own, `python keeper.py`.

A container outlives the runtime process that started it and becomes a child of the nearest subreaper, the only one
that is told how it ended. A process is a subreaper as a whole, and the orchestrator may be a library in somebody
else's. So this small one is; it holds all containers of a launcher without a thread for any. When the orchestrator
ends in any way, the socket closes and all containers are removed.

It talks JSON, a line each, over the socket at descriptor 0:

    → {"call": 1, "start": NAME, "bundle": FOLDER}     ← {"call": 1, "pid": 4711} or {"call": 1, "error": TEXT},
                                                         with "unfit" if no parent of its kind can be forked from
      with "root" and "agent", if it is to write to its root: as in `mounts`; and with "state", if layers of
      it, from the place "at" on, are what the containers "of", which have ended, wrote to theirs: as in `state`
      or, where they are "copied", stand still; with "parent", if it is one to fork sandboxes from; or with "from",
      the name of that one, and with the folder "image" where it is not to write to its root
    → {"call": 2, "kill": NAME}                        ← {"call": 2}, and when it has ended, the last line below
    → {"call": 4, "pause": NAME, "still": true}        ← {"call": 4} or {"call": 4, "error": TEXT}
    → {"call": 3, "remove": NAME}                      ← {"call": 3, "existed": true} or {"call": 3, "error": TEXT}
                                                       ← {"ended": NAME, "status": WAIT_STATUS, "said": TEXT}
                                                       ← {"lost": NAME, "said": TEXT}     with its parent

Only the standard library is imported, and little of it: it starts with every launcher.
"""

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    sys.path.append(__file__.rsplit(os.sep, 4)[0])

from orchestrator.launch.oci import groups
from orchestrator.launch.oci.kept import Container, Output, complaint

CALL_S = 60.0  # a runtime that takes longer is killed
_LAST_S = 120.0  # when the orchestrator is gone: what is not removed by then is left to the reaper
_COPIES = 4  # of one state there are two at most, but one may be late to go
_LINE_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_ADDR_NO_RANDOMIZE = 0x0040000
_NOT_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the orchestrator decides when its sandboxes end
_NOT_STARTED = 127 << 8  # a wait status, as a shell's
_GONE = "does not exist"  # what runtimes say of a container they do not know


class Keeper:
    """Serves until the orchestrator hangs up. `runtime`: the program with its global options."""

    def __init__(self, line: socket.socket, runtime: list[str]) -> None:
        self._line = line
        self._runtime = runtime
        self.state = runtime[-1]  # the value of --root
        self._received = b""
        self.containers: dict[str, Container] = {}
        self._running: dict[int, tuple[float, Callable[[int], None]]] = {}  # of the runtime: deadline, what next
        self._strays: dict[int, int] = {}  # children that ended before it was known whose they are
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._until_s = math.inf  # set when the orchestrator has hung up
        self._has_mounts = False  # of its own
        self._forking: Any = None  # a `Forking`, where there are parents

    def run(self) -> None:
        wakeup, signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _NOT_OURS:
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: os.read(wakeup, 4096))
        self.selector.register(self._line, selectors.EVENT_READ, self._receive)
        while self._open or (self.containers and time.monotonic() < self._until_s):
            for key, _ in self.selector.select(self._wait_s()):
                if self.selector.get_map().get(key.fd) is key:  # what came before it may have closed it
                    key.data()
            self._reap()
            for pid, (deadline, then) in list(self._running.items()):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    self._running[pid] = math.inf, then  # once: it ends when the kernel lets it
            if self._forking is not None:
                self._forking.look()

    # ------------------------------------------------------------ the orchestrator

    @property
    def _open(self) -> bool:
        return self._until_s == math.inf

    def _receive(self) -> None:
        chunk = b""
        with contextlib.suppress(OSError):  # reset: it ended without reading all it was told
            chunk = self._line.recv(_LINE_BYTES)
        if not chunk:
            self._hang_up()
            return
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request)
            elif "kill" in request:
                self.kill(request["kill"])
                self.tell(call=request["call"])
            elif "pause" in request:
                self._pause(request["call"], request["pause"], request["still"])
            else:
                self._remove(request["call"], request["remove"])

    def tell(self, **message: Any) -> None:
        if self._open:
            with contextlib.suppress(OSError):  # it is gone, which `_receive` finds next
                self._line.sendall(json.dumps(message).encode() + b"\n")

    def _hang_up(self) -> None:
        """The orchestrator is gone: nothing of it stays."""
        self._until_s = time.monotonic() + _LAST_S
        self.selector.unregister(self._line)
        self._line.close()
        for name in list(self.containers):
            self._remove(0, name)

    # ------------------------------------------------------------ containers

    def _start(self, request: dict[str, Any]) -> None:
        call, name, bundle = request["call"], request["start"], request["bundle"]
        container = self.containers[name] = Container(starting=True)
        container.call = call
        pid_file = os.path.join(bundle, "pid")
        argv = ["run", "--detach", "--bundle", bundle, "--pid-file", pid_file, name]
        passed = -1
        if "root" in request:
            container.root = bundle
            argv[1:1] = ["--preserve-fds", "1"]
            try:
                container.inodes = request["root"]["inodes"]
                passed = self._make_root(bundle, request)
            except OSError as error:
                self.fail(name, f"no writable root: {complaint(error)}")
                return
        if "from" in request:
            if passed >= 0:
                os.close(passed)
            image, agent = request.get("image"), request.get("agent")
            self.forking.fork(container, name, bundle, request["from"], image, agent)
            return
        if "parent" in request:
            argv[1:1] = ["--preserve-fds", "1"]
            try:
                passed = self.forking.make_parent(container, name, bundle, **request["parent"])
            except OSError as error:
                self.fail(name, f"no parent: {complaint(error)}")
                return
        try:
            self._call(argv, lambda status, output: self._started(call, name, pid_file, status, output), passed)
        finally:
            if passed >= 0:
                os.close(passed)

    @property
    def forking(self) -> Any:
        if self._forking is None:
            from orchestrator.launch.oci.forking import Forking

            self._forking = Forking(self)
        return self._forking

    def fail(self, name: str, why: str) -> None:
        """It does not start."""
        container = self.containers[name]
        container.starting, container.pid = False, 0
        self.tell(call=container.call, error=why)
        self.remove_if_wanted(name)

    def own_mounts(self) -> None:
        """What is mounted from here on is seen by nobody else. Raises OSError."""
        from orchestrator.launch.oci import mounts

        if not self._has_mounts:
            mounts.leave_mounts()
            self._has_mounts = True

    def _make_root(self, bundle: str, request: dict[str, Any]) -> int:
        """The descriptor of the agent's user namespace."""
        from orchestrator.launch.oci import mounts

        self.own_mounts()
        with open(os.path.join(bundle, "config.json")) as file:
            config = json.load(file)
        with mounts.user_namespace(mounts.AgentNamespace(**request["agent"])) as namespace:
            root = mounts.WritableRoot(**request["root"])
            if "state" in request:
                places = [told["destination"] for told in config["mounts"]]
                root = self._with_state(root, request["start"], places, **request["state"])
            mounts.make_root(bundle, root, namespace)
            mounts.make_places(os.path.join(bundle, mounts.MERGED), mounts.first_places(config))
            return os.dup(namespace)

    def _with_state(
        self, root: Any, guest: str, places: Sequence[str], of: Sequence[str], at: int, copied: bool, **scope: Any
    ) -> Any:
        """The root, with what the containers `of` wrote to their own as layers. `places`: where something is to be
        mounted. Raises OSError."""
        from orchestrator.launch.oci import mounts, state

        layers = []
        for name in of:
            source = self.containers.get(name)
            if (
                source is None
                or source.starting
                or not source.root
                or (source.pid and not (copied and source.still))
            ):
                raise OSError(0, f"{name} is not there, or has not ended")
            folder = source.root
            mounts.make_room(source.root, _COPIES * source.inodes)  # links have numbers too
            if copied:
                folder = os.path.join(source.root, mounts.WRITTEN, guest)
                self.containers[guest].copies.append((name, folder))
                state.copy_written(source.root, folder, scope["mark"])
            if not source.pid:
                mounts.release_root(source.root)
            owner, shift = root.owner, root.owner if root.shifted else 0
            layers.append(state.state_in_scope(folder, state.StateScope(**scope), root.lowers[at:], owner, shift))
            state.clear_way(layers[-1], places)
        lowers = [*root.lowers[:at], *layers, *root.lowers[at:]]
        return root._replace(lowers=lowers, own=range(at, at + len(layers)))

    def _started(self, call: int, name: str, pid_file: str, status: int, output: Output) -> None:
        container = self.containers[name]
        container.starting, container.output = False, output
        pid = _number(pid_file) if status == 0 else 0
        end = self._strays.pop(pid, None)
        container.pid = 0 if end is not None else pid
        if pid and container.forks is not None:  # a parent is there when it says so, too
            self.forking.answer_if_there(container)
        elif pid:
            self.tell(call=call, pid=pid)
        else:
            reason = f"it ended with {_end(status)}" if status else "it reported no process id"
            self.tell(call=call, error=output.last_words() or reason)
        if not any(other.starting for other in self.containers.values()):
            self._strays.clear()
        if end is not None:
            self.ended(name, end)
        else:
            self.remove_if_wanted(name)

    def ended(self, name: str, status: int) -> None:
        """Its pid 1 was waited for: from now on that number is another's."""
        container = self.containers[name]
        container.pid, container.has_ended = 0, True
        if container.root:
            from orchestrator.launch.oci.mounts import show_written

            show_written(container.root)
        self.tell(ended=name, status=status, said=container.output.last_words())
        if container.forks is not None:  # when it is known that nothing more can be forked from it
            self.forking.lose(container, name)
        self.remove_if_wanted(name)

    def _remove(self, call: int, name: str) -> None:
        self.containers.setdefault(name, Container()).removals.append(call)
        self.remove_if_wanted(name)

    def remove_if_wanted(self, name: str) -> None:
        """Ends the container, and with its pid 1 all that runs in it; then the rest is cleared away."""
        container = self.containers.get(name)
        if container is None or not container.removals or container.starting or container.deleting:
            return
        if container.pid:
            self.kill(name)
            return
        container.deleting = True
        state = os.path.join(self.state, name)
        is_forked = container.fork is not None or groups.is_forked(state)  # by a keeper before this one
        if (container.has_ended or is_forked) and groups.clear(state):
            self._deleted(name, 0, Output())
        elif is_forked and groups.is_forked(state):
            output = Output()
            output.tail = b"its control groups are still in use"
            self._deleted(name, 1, output)
        elif container.fork is not None and not os.path.exists(state):  # its parent was not even asked for it
            self._deleted(name, 0, Output())
        else:
            self._call(("delete", "--force", name), lambda status, output: self._deleted(name, status, output))

    def kill(self, name: str) -> None:
        """Kills its pid 1, and with it all that runs in it: it has ended when none of them is left."""
        container = self.containers.get(name)
        if container is not None and container.pid:
            if container.fork is not None:
                container.fork.kill()
            else:
                os.kill(container.pid, signal.SIGKILL)  # our child, not waited for yet: the number is its own
            container.killed = True
            if container.still:  # what stands still does not end
                self._pause(0, name, False)

    def _pause(self, call: int, name: str, still: bool) -> None:
        container = self.containers.get(name)
        if container is None or not container.pid:
            self.tell(call=call, **({"error": "it has ended"} if still else {}))
            return
        if container.fork is not None:
            is_done = groups.freeze(os.path.join(self.state, name), still)
            self._paused(call, container, name, still, 0 if is_done else 1, Output())
            return
        verb = "pause" if still else "resume"
        self._call((verb, name), lambda status, output: self._paused(call, container, name, still, status, output))

    def _paused(
        self, call: int, container: Container, name: str, still: bool, status: int, output: Output
    ) -> None:
        container.still = container.still if status else still
        failed = status and container.pid  # else it has ended meanwhile
        self.tell(
            call=call, **({"error": output.last_words() or f"it ended with {_end(status)}"} if failed else {})
        )
        if still and container.killed and container.pid:
            self._pause(0, name, False)

    def _deleted(self, name: str, status: int, output: Output) -> None:
        """Nothing more can be done about the container here."""
        message = output.last_words()
        existed = _GONE not in message
        answer: dict[str, Any] = {"existed": existed}
        if status != 0 and existed:
            answer = {"error": message or f"it ended with {_end(status)}"}
        container = self.containers.pop(name)
        if container.root:
            from orchestrator.launch.oci.mounts import remove_root

            remove_root(container.root)
        self._remove_copies(container)
        for each in (output, container.output):
            self._forget(each)
            if each.readable >= 0:
                os.close(each.readable)
        if container.forks is not None or container.fork is not None:
            self.forking.forget(container)
        container.users.close()
        for call in container.removals:
            self.tell(call=call, **answer)

    def _remove_copies(self, container: Container) -> None:
        for name, folder in container.copies:
            from orchestrator.launch.oci import mounts, tree

            source = self.containers.get(name)
            with contextlib.suppress(OSError):  # it is gone with its source
                tree.remove(folder)
                if source is not None:
                    mounts.limit_inodes(source.root, source.inodes)

    def read_output(self, output: Output) -> None:
        if not output.read():
            self._forget(output)

    def _forget(self, output: Output) -> None:
        with contextlib.suppress(KeyError, ValueError):  # at its end already, or without a pipe
            self.selector.unregister(output.readable)

    # ------------------------------------------------------------ processes

    def _call(self, arguments: Sequence[str], then: Callable[[int, Output], None], passed: int = -1) -> None:
        """Runs the runtime. `then` gets its wait status and what it prints. `passed`: a descriptor that it finds
        under the number 3."""
        output, argv, pid = Output(), [*self._runtime, *arguments], 0
        try:
            output.readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.set_blocking(writable, True)
                self.selector.register(output.readable, selectors.EVENT_READ, lambda: self.read_output(output))
                actions = [
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, writable, number) for number in (1, 2)),
                    *([(os.POSIX_SPAWN_DUP2, passed, 3)] if passed >= 0 else []),
                ]
                defaults = [signal.SIGPIPE, *_NOT_OURS]
                pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setsigdef=defaults)
            finally:
                os.close(writable)
        except OSError as error:  # no room for a process or a pipe, or the program is gone
            output.tail = f"cannot start {argv[0]}: {complaint(error)}".encode()
        if pid:
            self._running[pid] = time.monotonic() + CALL_S, lambda status: then(status, output)
        else:
            then(_NOT_STARTED, output)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                self._running.pop(pid)[1](status)
            elif name := next((name for name, it in self.containers.items() if it.pid == pid), None):
                self.ended(name, status)
            elif any(container.starting for container in self.containers.values()):
                self._strays[pid] = status

    def _wait_s(self) -> float | None:
        """Until something must be looked at that tells nobody. None: nothing."""
        forked_s = math.inf if self._forking is None else self._forking.due_s()
        due = min([self._until_s, forked_s, *(deadline for deadline, _ in self._running.values())])
        return None if due == math.inf else max(0.0, due - time.monotonic())


def _number(file: str) -> int:
    """0: there is none."""
    try:
        with open(file) as text:
            return int(text.read())
    except (OSError, ValueError):
        return 0


def _end(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.personality(_ADDR_NO_RANDOMIZE)  # inherited: Python's addresses are the same in all sandboxes
    with socket.socket(fileno=os.dup(0)) as ours:
        ours.setblocking(True)
        Keeper(ours, sys.argv[1:]).run()
