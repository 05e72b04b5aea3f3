"""The line from a keeper to a parent of forked sandboxes, whose messages `sandbox/boot/parent` describes.

Only the standard library is imported.
"""

import json
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_MOST_BYTES = 1 << 16
ASKING_S = 10.0  # a parent reads at once
PARENT_ENDED = "its parent has ended"


class Wish(NamedTuple):
    """A sandbox that a parent is to be asked for."""

    name: str
    bundle: str
    image: str | None
    agent: Mapping[str, Any] | None


class Forked(NamedTuple):
    """What a parent tells of a process. `pid`: here; 0: it has ended. `inner`: as its box numbers it. `pidfd`: the
    receiver's to close."""

    name: str
    pid: int
    inner: int
    pidfd: int


class ParentLine:
    """The keeper's end of one; `theirs` is the parent's, which the caller closes. Messages are read by `hear`."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ASKING_S)
        self.theirs = theirs.detach()
        self.names: dict[int, str] = {}  # of what was forked, by its number in the box
        self.is_ready = False
        self.is_answered = False  # whether it can be forked from
        self.waiting: deque[Wish] = deque()  # until the parent has answered others
        self.asked: set[str] = set()  # the names of those that it has not answered

    def fileno(self) -> int:
        """-1: it is closed."""
        return self._line.fileno()

    def close(self) -> None:
        """The parent ends, and with it all that was forked from it. Idempotent."""
        self._line.close()

    def ask(
        self, name: str, agent: Mapping[str, Any] | None, trees: Mapping[str, int], descriptors: Sequence[int]
    ) -> None:
        """Asks for a sandbox. `descriptors`: as in `Request`, without the trees. Raises OSError."""
        told = json.dumps({"fork": name, "agent": agent, "trees": list(trees)}).encode()
        try:
            socket.send_fds(self._line, [told], [*descriptors[:3], *trees.values(), *descriptors[3:]])
        except ConnectionError:
            raise OSError(0, PARENT_ENDED) from None

    def give_root(self, configuration: int, trees: Mapping[str, int]) -> None:
        """What the parent waits for first, if it is rooted. Raises OSError."""
        told = json.dumps({"root": list(trees)}).encode()
        socket.send_fds(self._line, [told], [configuration, *trees.values()])

    def hear(self) -> dict[str, Any] | Forked | None:
        """The next message; None: there is none any more."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._line, _MOST_BYTES, 1)
        except OSError:
            return None
        if not message:
            return None
        told: dict[str, Any] = json.loads(message)
        if "forked" not in told:
            return told
        return Forked(told["forked"], _number(descriptors[0]), told["process"], descriptors[0])


def _number(pidfd: int) -> int:
    """Of the process, here; 0: it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next((max(0, int(line.removeprefix("Pid:"))) for line in file if line.startswith("Pid:")), 0)
