"""Whether newcomers may connect to a sandbox's socket: only while the sandbox is not connected.

A connection costs also where it is turned away at once: gRPC accepts before it counts, in the threads that
serve all sandboxes, tens of thousands a second, and has no hook before it. The kernel has one: connecting asks
for write permission on the socket. A sandbox needs one connection, so once it has parked its socket is shut; it
is opened again when the connection is lost, later each time.

Users with CAP_DAC_OVERRIDE walk through; in a sandbox nobody has it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.backoff import Backoff

LOOK_S = 1.0  # how soon a lost connection is noticed; a sandbox tries to come back for ten times that
_OPEN, _SHUT = 0o666, 0o000  # a sandbox has other uids than we; the directories above keep everybody else away
_LOOK_WHILE_OPEN_S = 0.1
_BETWEEN_OPENINGS = Backoff(first_s=0.5, most_s=4.0)


class Door:
    """The way into the socket at `path`. Whoever opened it closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        """The socket is there. Raises OSError."""
        self._path.chmod(_OPEN)

    def shut(self) -> None:
        """The sandbox is connected. Idempotent."""
        if self._watching is None:
            self._path.chmod(_SHUT)
            self._watching = asyncio.create_task(self._watch(), name="door")

    async def aclose(self) -> None:
        """Nobody looks after it any more. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self) -> None:
        lost = 0
        await asyncio.sleep(LOOK_S)  # an older look has not seen this connection
        with suppress(FileNotFoundError):  # the directory went first: there is no way in
            while True:
                await self._connected(False, LOOK_S)
                await asyncio.sleep(_BETWEEN_OPENINGS.pause_s(lost))
                lost += 1
                self._path.chmod(_OPEN)
                await self._connected(True, _LOOK_WHILE_OPEN_S)
                self._path.chmod(_SHUT)

    async def _connected(self, wanted: bool, look_s: float) -> None:
        """Waits until somebody is, or nobody."""
        while (str(self._path) in _connections.paths(look_s / 2)) is not wanted:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(look_s)


class _Connections:
    """The Unix sockets of this process that are connected, by the path they were accepted at.

    One look serves all doors. Looked for among our own descriptors: /proc/net/unix does not list connections
    from other network namespaces.
    """

    def __init__(self) -> None:
        self._paths: frozenset[str] = frozenset()
        self._seen_s = float("-inf")

    def paths(self, max_age_s: float) -> frozenset[str]:
        """As they were at most `max_age_s` ago."""
        now = time.monotonic()
        if now - self._seen_s > max_age_s:
            self._paths, self._seen_s = _look(), now
        return self._paths


def _look() -> frozenset[str]:
    """Some 6 µs a descriptor: 5 ms with 200 sandboxes."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:  # no socket, or gone meanwhile
            continue
        try:
            if one.family == socket.AF_UNIX and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(one.getsockname())
        except OSError:
            continue
        finally:
            one.detach()  # it is not ours to close
    return frozenset(name for name in found if isinstance(name, str))


_connections = _Connections()
