"""The runner's rehearsal, once for all that is forked from this process."""

import os
import traceback
from typing import NoReturn

from sandbox.control import control_line
from sandbox.pid1.worker_setup import place_pipes
from sandbox.runner.runner import rehearse
from sandbox.runner.worker_link import WorkerLink
from sandbox.worker.worker import EXIT_BROKEN, Worker


def rehearse_here() -> None:
    """Leaves no process and no descriptor behind. Raises RuntimeError; OSError for what the machine lacks."""
    control, theirs = control_line()
    commands_in, commands_out = os.pipe()
    frames_in, frames_out = os.pipe()
    output_in, output_out = os.pipe()
    if (worker := os.fork()) == 0:
        _work(commands_in, frames_out, output_out)
    control.announce_start(1, (commands_out, frames_in, output_in))  # before it is asked for
    for number in (commands_in, commands_out, frames_in, frames_out, output_in, output_out):
        os.close(number)
    link = WorkerLink(theirs)
    try:
        link.replace()
        rehearse(link)
    finally:
        link.close()
        control.close()
        os.waitpid(worker, 0)


def _work(commands: int, frames: int, output: int) -> NoReturn:
    status = EXIT_BROKEN
    try:
        place_pipes(commands, frames, output)
        Worker().serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
