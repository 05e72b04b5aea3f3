"""The runner's side of a worker, as pid 1 and the worker end."""

import os
import time

import pytest

from sandbox.control import control_line
from sandbox.errors import SupervisorGone
from sandbox.runner.worker_link import WorkerLink


def test_a_worker_says_nothing_more_once_pid_1_is_gone() -> None:
    """Without a seal, code can kill pid 1 and go on: what it does then is no step of the rollout."""
    ours, theirs = control_line()
    pipes = [os.pipe() for _ in range(3)]
    (commands, commands_out), (frames_in, frames), (output_in, output) = pipes
    ours.announce_start(1, (commands_out, frames_in, output_in))
    link = WorkerLink(theirs)
    link.replace()
    frame = b"\0\0\0\x02{}"
    os.write(frames, frame)
    assert link.receive(time.monotonic() + 5) == {}
    os.write(frames, frame)
    ours.close()
    with pytest.raises(SupervisorGone):
        link.receive(time.monotonic() + 5)
    link.close()
    for number in (commands, commands_out, frames_in, frames, output_in, output):
        os.close(number)
