"""The parent that sandboxes are forked from: pid 1 of a box without a network, an image, a task and a channel.

    python parent.py            descriptor 3 is the keeper's line

It imports what pid 1 of a sandbox imports, and says what it is. For each request it forks a child, which enters a
sandbox of its own (`entering`) and becomes its pid 1. The parent reads no text of a model and runs no code of one.
Its messages are JSON, one a packet:

    ← {"ready": MODULES} or {"unfit": WHY}                      once
    → {"fork": NAME, "agent": ..., "trees": [PLACE, ...]} and descriptors     `Request`
    ← {"forked": NAME} and a pidfd, or {"refused": NAME, "why": TEXT}
    ← {"ended": NAME, "status": WAIT_STATUS}
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sandbox.boot.entering import Request, enter
from sandbox.boot.packed import PackedImports
from sandbox.pid1.filter import libc

LINE = 3
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64
_OWN = {0, 1, 2, LINE}
_NEW_PROCESSES = 0x20000000  # CLONE_NEWPID


def unfit() -> str:
    """Why nothing may be forked from this process, by what its modules have started. Empty: all is well."""
    if len(threads := os.listdir("/proc/self/task")) > 1:
        return f"what it imports starts {len(threads) - 1} threads"
    kept = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in _OWN:
            try:
                kept.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:  # the one that the folder was read with
                continue
    return f"what it imports opens {', '.join(sorted(kept)[:4])}" if kept else ""


class Parent:
    """Serves until the keeper hangs up. `become`: what a child does when it is sealed."""

    def __init__(self, line: socket.socket, become: Callable[[list[str]], int]) -> None:
        self._line = line
        self._become = become
        self._children: dict[int, str] = {}
        self._processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._wakeup, self._signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = [number for number, _ in poll.poll()]
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._line.fileno() in ready and not self._serve_one():
                return

    def _serve_one(self) -> bool:
        """False: the keeper has hung up."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._line, _MOST_BYTES, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return False
        if not message:
            return False
        told = json.loads(message)
        request = Request(told["fork"], told["agent"], tuple(told["trees"]), descriptors)
        try:
            self._fork(request)
        except OSError as error:
            self._tell({"refused": request.name, "why": error.strerror or str(error)})
        finally:
            for number in descriptors:
                os.close(number)
        return True

    def _fork(self, request: Request) -> None:
        """The child is pid 1 of its processes from its first moment. Raises OSError."""
        libc("unshare", _NEW_PROCESSES)
        try:
            pid = os.fork()
            if pid == 0:
                self._be_child(request)
        finally:
            libc("setns", self._processes, _NEW_PROCESSES)
        self._children[pid] = request.name
        # Not waited for yet: the number is the child's.
        descriptor = os.pidfd_open(pid)
        try:
            self._tell({"forked": request.name}, descriptor)
        finally:
            os.close(descriptor)

    def _be_child(self, request: Request) -> NoReturn:
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._line.close()
            for number in (self._wakeup, self._signalled, self._processes):
                os.close(number)
            arguments = enter(request)
            status = self._become(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if (name := self._children.pop(pid, None)) is not None:
                self._tell({"ended": name, "status": status})

    def _tell(self, message: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._line, [json.dumps(message).encode()], descriptors)


def main() -> int:
    """0: the keeper has hung up; 1: nothing may be forked from here."""
    with PackedImports():
        from sandbox.boot.imported import imported

    become = imported()
    with socket.socket(fileno=LINE) as line:
        if why := unfit():
            socket.send_fds(line, [json.dumps({"unfit": why}).encode()], [])
            return 1
        gc.collect()
        gc.freeze()
        parent = Parent(line, become)
        socket.send_fds(line, [json.dumps({"ready": len(sys.modules)}).encode()], [])
        parent.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
