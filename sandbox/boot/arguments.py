"""Pid 1's command line. It holds nothing of the task: every process in the container can read it."""

from __future__ import annotations

import argparse
from pathlib import Path

from sandbox.types import Box, Identities


def box_of(arguments: list[str]) -> Box:
    """Parses the arguments; wrong ones end the process with a usage message."""
    parser = argparse.ArgumentParser(
        prog="python -m sandbox", description="Pid 1 of a sandbox container.", allow_abbrev=False
    )
    parser.add_argument("--channel", type=Path, required=True, help="directory of the orchestrator's socket")
    parser.add_argument("--attachments", type=Path, required=True, help="where the task's files are put")
    parser.add_argument("--workspace", type=Path, required=True, help="working directory of model-written code")
    parser.add_argument("--runner-uid", type=int, help="identity of the agent loop; needs the two below")
    parser.add_argument("--worker-uid", type=int, help="identity of model-written code")
    parser.add_argument("--channel-gid", type=int, help="group that may reach the socket")
    parser.add_argument("--worker-processes", type=int, default=100, help="most processes of the worker's uid")
    parser.add_argument("--preload", action="append", default=[], help="a module to import ahead for a program")
    given = parser.parse_args(arguments)
    ids = (given.runner_uid, given.worker_uid, given.channel_gid)
    if None in ids and any(one is not None for one in ids):
        parser.error("--runner-uid, --worker-uid and --channel-gid come together or not at all")
    if ids[0] is not None and (min(ids) < 1 or ids[0] == ids[1]):
        parser.error("the runner and the worker need two different uids, and none may be 0")
    return Box(
        channel=given.channel.absolute(),
        attachments=given.attachments.absolute(),
        workspace=given.workspace.absolute(),
        identities=None if ids[0] is None else Identities(*ids),
        worker_processes=given.worker_processes,
        preload=tuple(given.preload),
    )
