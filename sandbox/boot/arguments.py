"""Pid 1's command line. It holds nothing of the task: every process in the container can read it.

    --channel FOLDER          of the orchestrator's socket
    --attachments FOLDER      where the task's files are put
    --workspace FOLDER        working directory of model-written code
    --runner-uid NUMBER       identity of the agent loop; needs the two below
    --worker-uid NUMBER       identity of model-written code
    --channel-gid NUMBER      group that may reach the socket
    --worker-processes NUMBER most processes of the worker's uid; 100 unless told
    --preload MODULE          to import ahead for a program; any number of times

It is read by hand: argparse and what it loads took a twentieth of a sandbox's start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from sandbox.types import Box, Identities

_PLACES = ("--channel", "--attachments", "--workspace")
_IDENTITIES = ("--runner-uid", "--worker-uid", "--channel-gid")
_PROCESSES, _PRELOAD = "--worker-processes", "--preload"
_EXIT_USAGE = 2


def box_of(arguments: list[str]) -> Box:
    """Parses the arguments; wrong ones end the process with a line that says why."""
    given: dict[str, str] = {_PROCESSES: "100"}
    preload: list[str] = []
    rest = iter(arguments)
    for name in rest:
        if name not in (*_PLACES, *_IDENTITIES, _PROCESSES, _PRELOAD):
            _refuse(f"unrecognized arguments: {name}")
        if (value := next(rest, None)) is None:
            _refuse(f"{name} needs a value")
        if name == _PRELOAD:
            preload.append(value)
        else:
            given[name] = value
    if missing := [name for name in _PLACES if name not in given]:
        _refuse(f"missing: {', '.join(missing)}")
    channel, attachments, workspace = (Path(given[name]).absolute() for name in _PLACES)
    return Box(
        channel=channel,
        attachments=attachments,
        workspace=workspace,
        identities=_identities([_number(given, name) for name in _IDENTITIES if name in given]),
        worker_processes=_number(given, _PROCESSES),
        preload=tuple(preload),
    )


def _identities(ids: list[int]) -> Identities | None:
    if not ids:
        return None
    if len(ids) < len(_IDENTITIES):
        _refuse(f"{', '.join(_IDENTITIES)} come together or not at all")
    if min(ids) < 1 or ids[0] == ids[1]:
        _refuse("the runner and the worker need two different uids, and none may be 0")
    return Identities(*ids)


def _number(given: dict[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        _refuse(f"{name} {given[name]!r} is no whole number")


def _refuse(why: str) -> NoReturn:
    print(f"python -m sandbox: {why}", file=sys.stderr)
    sys.exit(_EXIT_USAGE)
