"""Pid 1's command line. It holds nothing of the task: every process in the container can read it.

    --channel FOLDER          of the orchestrator's socket
    --attachments FOLDER      where the task's files are put
    --workspace FOLDER        working directory of model-written code
    --runner-uid NUMBER       identity of the agent loop; needs the two below
    --worker-uid NUMBER       identity of model-written code
    --channel-gid NUMBER      group that may reach the socket
    --worker-processes NUMBER most processes of the worker's uid; 100 unless told
    --agent-namespace NUMBER  descriptor of the user namespace of model-written code, with the next two
    --agent-uid NUMBER        whom it runs as there
    --agent-gid NUMBER        and its group
    --preload MODULE          to import ahead for a program; any number of times
    --env NAME=VALUE          for the agent's processes; any number of times

It is read by hand: argparse and what it loads took a twentieth of a sandbox's start.
"""

import sys
from pathlib import Path
from typing import NoReturn

from sandbox.types import AgentUser, Box, Identities

_PLACES = ("--channel", "--attachments", "--workspace")
_IDENTITIES = ("--runner-uid", "--worker-uid", "--channel-gid")
_AGENT = ("--agent-namespace", "--agent-uid", "--agent-gid")
_PROCESSES, _PRELOAD, _ENV = "--worker-processes", "--preload", "--env"
_EXIT_USAGE = 2


def box_of(arguments: list[str]) -> Box:
    """Parses the arguments; wrong ones end the process with a line that says why."""
    named = (*_PLACES, *_IDENTITIES, *_AGENT, _PROCESSES, _PRELOAD, _ENV)
    values: dict[str, list[str]] = {name: [] for name in named}
    rest = iter(arguments)
    for name in rest:
        if name not in values:
            _refuse(f"unrecognized arguments: {name}")
        if (value := next(rest, None)) is None:
            _refuse(f"{name} needs a value")
        values[name].append(value)
    if missing := [name for name in _PLACES if not values[name]]:
        _refuse(f"missing: {', '.join(missing)}")
    channel, attachments, workspace = (Path(values[name][-1]).absolute() for name in _PLACES)
    ids, agent = (
        [_number(name, values[name][-1]) for name in names if values[name]] for names in (_IDENTITIES, _AGENT)
    )
    for names, numbers in ((_IDENTITIES, ids), (_AGENT, agent)):
        if len(numbers) not in (0, len(names)):
            _refuse(f"{', '.join(names)} come together or not at all")
    if ids and (min(ids) < 1 or ids[0] == ids[1]):
        _refuse("the runner and the worker need two different uids, and none may be 0")
    if agent and not ids:
        _refuse("an agent with a namespace needs a runner and a worker")
    processes = _number(_PROCESSES, ["100", *values[_PROCESSES]][-1])
    identities = Identities(*ids) if ids else None
    user = AgentUser(*agent) if agent else None
    environment = tuple(entry.partition("=")[::2] for entry in values[_ENV])
    return Box(channel, attachments, workspace, identities, processes, tuple(values[_PRELOAD]), environment, user)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        _refuse(f"{name} {value!r} is not a whole number")


def _refuse(why: str) -> NoReturn:
    print(f"python -m sandbox: {why}", file=sys.stderr)
    sys.exit(_EXIT_USAGE)
