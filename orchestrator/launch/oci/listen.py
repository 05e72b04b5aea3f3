"""Opens a socket that listens in the network namespace of a sandbox, on its loopback: `python listen.py PID PORT`.

The socket goes over the Unix socket at descriptor 0. A thread of the orchestrator could not do it: an ordinary
user has to enter the user namespace first in which its containers are, which a process with threads may not. Only
the standard library is imported.
"""

import ctypes
import os
import socket
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_WAITING = 128


def main(pid: str, port: str) -> None:
    """Ends with a line that says why if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = {"user": _CLONE_NEWUSER, "net": _CLONE_NEWNET}
    for kind, flag in kinds.items():
        if kind == "user" and os.geteuid() == 0:
            continue
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(namespace, flag) != 0:
            sys.exit(f"no way into the sandbox's namespace ({kind}): {os.strerror(ctypes.get_errno())}")
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=_WAITING)
    with socket.socket(fileno=os.dup(0)) as line:
        socket.send_fds(line, [b"x"], [listener.fileno()])


if __name__ == "__main__":
    main(*sys.argv[1:3])
