"""What a keeper knows of its containers. Only the standard library is imported."""

import contextlib
import errno
import os
import resource
import selectors
from typing import Any, Protocol

_TAIL_BYTES = 4000
_LAST_PIECES = 4
_PIECE_BYTES = 1 << 16


class Output:
    """What the runtime prints, and a container that it starts: the end of it. `readable` -1: there is no pipe."""

    def __init__(self) -> None:
        self.readable = -1
        self.tail = b""

    def read(self, most: int = 1) -> bool:
        """Reads at most so many pieces, so that no writer can hold up the others. False: nobody can write any
        more."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(most if self.readable >= 0 else 0):
                chunk = os.read(self.readable, _PIECE_BYTES)
                if not chunk:
                    return False
                self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        return True

    def last_words(self) -> str:
        self.read(most=_LAST_PIECES)
        return self.tail.decode("utf-8", "replace").strip()


class Container:
    """From the call that starts it to the one that removes it. `pid` 0: it is being started, did not start, or has
    ended. `output` is empty if another keeper started it."""

    def __init__(self, *, starting: bool = False) -> None:
        self.output = Output()
        self.pid = 0
        self.has_ended = False  # it has run, and none of its processes is left
        self.starting = starting
        self.root = ""  # the folder in which its writable root is mounted
        self.inodes = 0  # that the root may have
        self.still = self.killed = False
        self.copies: list[tuple[str, str]] = []  # (whose root it is of, folder), which are layers of this one's
        self.deleting = False
        self.removals: list[int] = []  # the calls that ask for its removal
        self.call = 0  # the call that starts it
        self.users = contextlib.ExitStack()  # of a parent: what holds its user namespace
        self.forks: Any = None  # of a parent: its `forking.ParentLine`
        self.fork: Any = None  # of one that is forked: its `forking.Fork`


def complaint(error: OSError) -> str:
    """What is told of it, and what to do."""
    text = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ETOOMANYREFS):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text += f" (the process that watches sandboxes may have {most}: raise `ulimit -n`)"
    return text


class Keeping(Protocol):
    """What a keeper does for what it starts in another way than by the runtime. `state`: the folder of what is
    remembered of containers."""

    containers: dict[str, Container]
    selector: selectors.BaseSelector
    state: str

    def tell(self, **message: Any) -> None:
        """Sends the orchestrator a message, while it is there."""

    def fail(self, name: str, why: str) -> None:
        """It does not start."""

    def ended(self, name: str, status: int) -> None:
        """Its pid 1 was waited for."""

    def kill(self, name: str) -> None:
        """Kills its pid 1, and with it all that runs in it."""

    def remove_if_wanted(self, name: str) -> None:
        """If somebody has asked for it."""

    def read_output(self, output: Output) -> None:
        """When there is some."""

    def own_mounts(self) -> None:
        """What is mounted from here on is seen by nobody else. Raises OSError."""
