"""The root of a template that imports modules of an image first.

It gets the image as its root, and the places and variables that a program has in a sandbox of it, and becomes a
fresh Python there: modules find what they would find in a sandbox. It keeps the right to make sandboxes.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from sandbox.boot.arguments import box_of
from sandbox.boot.entering import MOST_BYTES, make_root
from sandbox.pid1.filter import libc
from sandbox.pid1.worker_setup import agent_environment
from sandbox.runner.endpoint.server import PRELOADED_PORT, environment_at

_NEW_MOUNTS = 0x00020000


def exec_in_root(python: Sequence[str], places: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
    """Makes the root, and executes `python`, a command line, there, with the numbers of a user and of a group, the
    value of PYTHONPATH, and the names of modules. `descriptors`: a sandbox's configuration, and a detached mount
    for each of the places. Raises OSError."""
    config = json.loads(os.pread(descriptors[0], MOST_BYTES, 0))
    libc("unshare", _NEW_MOUNTS)
    make_root(config, dict(zip(places, descriptors[1:], strict=True)))
    for number in descriptors:
        os.close(number)
    given: list[str] = config["process"]["args"]
    box = box_of(given[next(n for n, text in enumerate(given) if text.endswith("/sandbox/__main__.py")) + 1 :])
    user = [str(config["process"]["user"][kind]) for kind in ("uid", "gid")]
    environment = {**agent_environment(box, _cpu_millis(config)), **environment_at(PRELOADED_PORT)}
    path = environment.pop("PYTHONPATH", "")  # what Python runs from there at its start, it would run as root
    argv = [*python, *user, path, *box.preload]
    os.execve(python[0], argv, environment)  # noqa: S606 - no shell is wanted
    raise AssertionError("it does not return")


def _cpu_millis(config: dict[str, Any]) -> int | None:
    limit = config["linux"]["resources"].get("cpu")
    return None if limit is None else limit["quota"] * 1000 // limit["period"]
