"""Makes sockets in the network namespaces of sandboxes: `python sockets.py`, one process for a launcher.

    → PID                  ← ok, and with it a TCP socket of the namespace in which this process is
    → PID ADDRESS PORT     ← ok, and with it one that listens there
                           ← what is wrong, in a line

Packets over the Unix socket at descriptor 0. A socket stays in the namespace in which it was made, whoever
connects it. A thread of the orchestrator could not do this: an ordinary user has to enter the user namespace first
in which its containers are, which a process with threads may not. Only the standard library is imported."""

import ctypes
import os
import socket

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_WAITING = 128
_PACKET = 256


def main() -> None:
    """Until the orchestrator hangs up."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_inside = os.geteuid() == 0

    def enter(pid: str, kind: str, flag: int) -> None:
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(namespace, flag) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(namespace)

    with socket.socket(fileno=os.dup(0)) as line:
        while packet := line.recv(_PACKET):
            pid, *place = packet.decode().split()
            try:
                if not is_inside:
                    enter(pid, "user", _CLONE_NEWUSER)
                    is_inside = True
                enter(pid, "net", _CLONE_NEWNET)
                with _made(place) as made:
                    socket.send_fds(line, [b"ok"], [made.fileno()])
            except OSError as error:
                line.send((error.strerror or str(error)).encode())


def _made(place: list[str]) -> socket.socket:
    if place:
        return socket.create_server((place[0], int(place[1])), backlog=_WAITING)
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


if __name__ == "__main__":
    main()
