"""Opens and shuts a sandbox's socket: new connections are possible only while the sandbox is not connected.

Even a connection that is refused at once costs time: gRPC accepts it before it counts connections, in the threads
that serve all sandboxes, tens of thousands a second, and has no hook before that. The kernel has one: connecting
needs write permission on the socket. A sandbox needs one connection, so its socket is shut once it has parked. It
is opened again when the connection is lost, after a longer pause each time.

Processes with CAP_DAC_OVERRIDE can connect all the same; in a sandbox none has it.
"""

import asyncio
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.rules.backoff import Backoff

LOOK_S = 1.0  # how soon a lost connection is noticed; a sandbox tries ten times as long to reconnect
_OPEN, _SHUT = 0o666, 0o000  # sandboxes have other uids; the directories above keep other users out
_LOOK_WHILE_OPEN_S = 0.1
_BETWEEN_OPENINGS = Backoff(first_s=0.5, most_s=4.0)


class Door:
    """The way into the socket at `path`. Whoever opened it closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Lets the sandbox connect. The socket must exist. Raises OSError."""
        self._path.chmod(_OPEN)

    def shut(self) -> None:
        """Keeps new connections out: the sandbox is connected. Idempotent."""
        if self._watching is None:
            self._path.chmod(_SHUT)
            self._watching = asyncio.create_task(self._watch(), name="door")

    async def aclose(self) -> None:
        """Ends watching the connection. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self) -> None:
        lost = 0
        await asyncio.sleep(LOOK_S)  # a cached look may be older than this connection
        with suppress(FileNotFoundError):  # the directory is gone, and the socket with it
            while True:
                await self._connected(False, LOOK_S)
                await asyncio.sleep(_BETWEEN_OPENINGS.pause_s(lost))
                lost += 1
                self._path.chmod(_OPEN)
                await self._connected(True, _LOOK_WHILE_OPEN_S)
                self._path.chmod(_SHUT)

    async def _connected(self, wanted: bool, look_s: float) -> None:
        """Waits until a connection exists, or until none does."""
        while (str(self._path) in _connections.paths(look_s / 2)) is not wanted:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(look_s)


class _Connections:
    """Paths at which this process has accepted connections to Unix sockets that are still open.

    One look serves all doors. It goes through this process' descriptors, as /proc/net/unix does not list
    connections from other network namespaces.
    """

    def __init__(self) -> None:
        self._paths: frozenset[str] = frozenset()
        self._seen_s = float("-inf")

    def paths(self, max_age_s: float) -> frozenset[str]:
        """The paths, looked up at most `max_age_s` ago."""
        now = time.monotonic()
        if now - self._seen_s > max_age_s:
            self._paths, self._seen_s = _look(), now
        return self._paths


def _look() -> frozenset[str]:
    """Costs some 6 µs per descriptor: 5 ms with 200 sandboxes."""
    paths = set()
    for name in os.listdir("/dev/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if one.family == socket.AF_UNIX and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                paths.add(one.getsockname())
        except OSError:
            continue
        finally:
            one.detach()  # it is not ours to close
    return frozenset(name for name in paths if isinstance(name, str))


_connections = _Connections()
