"""A real supervisor with real code workers, whose runner is the test process.

Started as a program of its own (`python -m tests.fakes.worker_host FD WORKSPACE`), it hands the
runner's end of the control line over to the test and stays until the test closes its socket.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.launch.channels import tether
from sandbox.control import RunnerEnd
from sandbox.pid1.supervisor import Supervisor
from sandbox.runner.worker_link import WorkerLink
from sandbox.types import Box, Confinement

ROOT = Path(__file__).parents[2]


@contextmanager
def worker_link(workspace: Path) -> Iterator[WorkerLink]:
    """A link to workers without identities of their own; `replace()` gives the first."""
    with tempfile.TemporaryDirectory() as channel, tether(Path(channel)):
        yield from _linked(workspace, Path(channel))


def _linked(workspace: Path, channel: Path) -> Iterator[WorkerLink]:
    ours, theirs = socket.socketpair()
    host = subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno()), str(workspace), str(channel)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONHASHSEED": "0"},
        pass_fds=[theirs.fileno()],
    )
    try:
        theirs.close()
        ours.settimeout(120)
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        control = RunnerEnd(socket.socket(fileno=fds[0]))
        yield WorkerLink(control)
        control.close()
        ours.close()
        assert host.wait(30) == 0
    finally:
        ours.close()
        host.kill()
        host.wait()


def _hand_over(box: Box, control: RunnerEnd, confinement: Confinement) -> int:
    test = socket.socket(fileno=int(sys.argv[1]))
    socket.send_fds(test, [b"control"], [control.fileno()])
    test.recv(1)  # until the test closes it
    return 0


if __name__ == "__main__":
    place, channel = Path(sys.argv[2]), Path(sys.argv[3])
    sys.exit(Supervisor(Box(channel, place, place, None, 100), _hand_over).run())
