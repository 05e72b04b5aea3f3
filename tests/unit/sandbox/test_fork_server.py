"""The server of a parent, with a template that a test plays."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
from typing import Any

from sandbox.boot.parent import Server

HANG_S = 10.0


def test_a_child_killed_with_its_request_in_its_hands_costs_that_start_alone() -> None:
    keeper, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handing, handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    going, go = os.pipe()
    for each in (keeper, handing, handed):
        each.setblocking(True)
    with subprocess.Popen(["sleep", "1000"]) as template, subprocess.Popen(["sleep", "1000"]) as child:
        server = Server(line, os.pidfd_open(template.pid), handing, handed, go)
        threading.Thread(target=server.serve, daemon=True).start()
        try:
            ask(keeper, "first")
            assert told(going) == b"f"
            assert json.loads(handed.recv(1 << 16))["fork"] == "first"
            handed.send(b"%d" % child.pid)
            child.send_signal(signal.SIGKILL)
            assert told(going) == b"w"
            handed.send(b"-%d %d" % (child.pid, signal.SIGKILL))
            assert hear(keeper) == {"refused": "first", "why": "it ended before it had its request"}
            assert hear(keeper) == {"ended": child.pid, "status": signal.SIGKILL}
            ask(keeper, "second")
            assert told(going) == b"f"
        finally:
            template.kill()
            child.kill()


def ask(keeper: socket.socket, name: str) -> None:
    keeper.send(json.dumps({"fork": name, "agent": None, "trees": []}).encode())


def hear(keeper: socket.socket) -> Any:
    assert select.select([keeper], [], [], HANG_S)[0], "the server says nothing"
    return json.loads(keeper.recv(1 << 16))


def told(going: int) -> bytes:
    assert select.select([going], [], [], HANG_S)[0], "the server tells the template nothing"
    return os.read(going, 1)
