"""The keeper's end of a parent's line: asks it for sandboxes, and hears how they end.

What goes over the line is described in `sandbox/boot/parent`. Only the standard library is imported.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.launch.oci import mounts

RUNTIME = "/opt/sandbox"
_MOST_BYTES = 1 << 16
_ATTRIBUTES = 1 | 2 | 4 | 8  # read-only, no set-uid programs, no devices, no programs


class Forked(NamedTuple):
    """A process of which its parent has told. `pidfd`: of the process; the receiver closes it."""

    name: str
    pid: int
    pidfd: int


class ParentLine:
    """`line`: the keeper's end."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def fileno(self) -> int:
        return self._line.fileno()

    def close(self) -> None:
        """The parent ends, and with it all that was forked from it. Idempotent."""
        self._line.close()

    def ask(self, name: str, trees: Mapping[str, int], descriptors: Sequence[int]) -> None:
        """Asks for a sandbox. `descriptors`: as in `Request`, without the trees. Raises OSError."""
        told = json.dumps({"fork": name, "trees": list(trees)}).encode()
        socket.send_fds(self._line, [told], [*descriptors[:3], *trees.values(), *descriptors[3:]])

    def hear(self) -> dict[str, Any] | Forked | None:
        """The next message; None: the parent has ended. Raises OSError."""
        message, descriptors, _, _ = socket.recv_fds(self._line, _MOST_BYTES, 1)
        if not message:
            return None
        told: dict[str, Any] = json.loads(message)
        if "forked" not in told:
            return told
        return Forked(told["forked"], _number(descriptors[0]), descriptors[0])


def bound(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(place, folder of this machine) of each mount that the parent does not have itself."""
    for told in config["mounts"]:
        if told["type"] == "bind" and told["destination"] != RUNTIME:
            yield told["destination"], told["source"]


def sealed_tree(folder: str) -> int:
    """A detached mount of `folder`. Raises OSError."""
    return mounts.detached(folder, _ATTRIBUTES)


def line() -> tuple[ParentLine, int]:
    """The keeper's end, and the descriptor of the parent's, which the caller closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ParentLine(ours), theirs.detach()


def _number(pidfd: int) -> int:
    """Of the process, here; 0: it has ended and was waited for."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        for entry in file:
            name, _, value = entry.partition(":")
            if name == "Pid":
                return max(0, int(value))
    return 0
