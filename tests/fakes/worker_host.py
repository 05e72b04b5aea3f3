"""A real supervisor with real code workers, whose runner is the test process.

Started as a program of its own (`python -m tests.fakes.worker_host FD WORKSPACE CHANNEL [LATE_S]`), it hands the
runner's end of the control line over to the test and stays until the test closes its socket. With LATE_S it is
pid 1 of a namespace of its own, workers have a user of their own, and the first killer comes that late.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.launch.channels import tether
from sandbox.control import RunnerEnd
from sandbox.pid1 import users
from sandbox.pid1.supervisor import Supervisor
from sandbox.runner.worker_link import WorkerLink
from sandbox.types import Box, Identities

ROOT = Path(__file__).parents[2]
OWN_UID = 54_320  # and the two numbers after it: nobody's on this machine


@contextmanager
def worker_link(workspace: Path, first_killer_late_s: float | None = None) -> Iterator[WorkerLink]:
    """A link to workers; `replace()` gives the first. With a late killer, which takes root, workers have a user of
    their own."""
    with tempfile.TemporaryDirectory() as channel, tether(Path(channel)):
        yield from _linked(workspace, Path(channel), first_killer_late_s)


def _linked(workspace: Path, channel: Path, late_s: float | None) -> Iterator[WorkerLink]:
    ours, theirs = socket.socketpair()
    alone = [] if late_s is None else ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    late = [] if late_s is None else [str(late_s)]
    host = subprocess.Popen(
        [*alone, sys.executable, "-m", __name__, str(theirs.fileno()), str(workspace), str(channel), *late],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONHASHSEED": "0", "PATH": os.environ["PATH"]},
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


def _hand_over(box: Box, control: RunnerEnd, confinement: pb.Confinement) -> int:
    test = socket.socket(fileno=int(sys.argv[1]))
    socket.send_fds(test, [b"control"], [control.fileno()])
    test.recv(1)  # until the test closes it
    return 0


def _delay_first_killer(late_s: float, mark: Path) -> None:
    """The first killer waits before it kills, as on a crowded machine."""
    kill = users.kill_everything_of

    def delayed(worker_uid: int, channel_gid: int) -> None:
        with suppress(FileExistsError):
            mark.touch(exist_ok=False)
            time.sleep(late_s)
        kill(worker_uid, channel_gid)

    users.kill_everything_of = delayed


if __name__ == "__main__":
    place, channel = Path(sys.argv[2]), Path(sys.argv[3])
    identities = None
    if sys.argv[4:]:
        identities = Identities(runner_uid=OWN_UID, worker_uid=OWN_UID + 1, channel_gid=OWN_UID + 2)
        _delay_first_killer(float(sys.argv[4]), channel / "first-killer")
    sys.exit(Supervisor(Box(channel, place, place, identities, 100), _hand_over).run())
