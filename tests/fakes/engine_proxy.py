"""A door before the Docker Engine's socket that can be shut: refuse, hang, answer nothing, drop, have no space."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType

ENGINE_SOCKET = Path("/var/run/docker.sock")


class Door(StrEnum):
    """What becomes of a connection, those open already included."""

    OPEN = "open"
    REFUSE = "refuse"  # closed at once, as an Engine that is not there
    HANG = "hang"  # nothing goes in or out, as an Engine that is stopped
    MUTE = "mute"  # the Engine hears and does, its answers are lost
    FULL = "full"  # no container can be made, all else works, as where the disk is full: `refusal` says why not


NO_SPACE = "mkdir /var/lib/docker/overlay2/x: no space left on device"
NO_FUSE = (
    "error creating overlay mount to /var/lib/docker/x/merged: fuse: failed to open /dev/fuse: Permission denied"
)


class EngineProxy:
    """`async with EngineProxy(path) as proxy`: DOCKER_HOST is `proxy.url`.

    `shut_at(call, door)`: the next request whose first line matches `call` finds the door like that, and
    so does everything after it.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.door = Door.OPEN
        self.refusal = NO_SPACE
        self.shut = asyncio.Event()  # the request of `shut_at` has come
        self._shutting: tuple[re.Pattern[bytes], Door] | None = None
        self._path = path
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> EngineProxy:
        self._server = await asyncio.start_unix_server(self._connected, self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()

    def shut_at(self, call: str, door: Door) -> None:
        self.shut.clear()
        self._shutting = re.compile(call.encode()), door

    def drop(self) -> None:
        """Cuts every connection there is."""
        for writer in list(self._writers):
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.door is Door.REFUSE:
            writer.close()
            return
        engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE_SOCKET)
        self._writers |= {writer, engine_writer}
        try:
            await asyncio.gather(
                self._requests(reader, engine_writer, writer), self._answers(engine_reader, writer)
            )
        finally:
            for end in (writer, engine_writer):
                end.close()
                self._writers.discard(end)

    async def _requests(
        self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                first_line = chunk.partition(b"\r\n")[0]
                if self._shutting is not None and self._shutting[0].search(first_line):
                    self.door, self._shutting = self._shutting[1], None
                    self.shut.set()
                    if self.door is Door.REFUSE:
                        self.drop()
                if self.door is Door.FULL and re.match(rb"POST \S*/containers/create", first_line):
                    await _rest_of(chunk, reader)
                    refusal = json.dumps({"message": self.refusal}).encode()
                    client.write(
                        b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
                    )
                elif self.door in (Door.OPEN, Door.MUTE, Door.FULL):
                    engine.write(chunk)
                    await engine.drain()
        engine.close()

    async def _answers(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                if self.door in (Door.OPEN, Door.FULL):
                    client.write(chunk)
                    await client.drain()
        client.close()


async def _rest_of(request: bytes, reader: asyncio.StreamReader) -> None:
    """Reads a request to its end."""
    while (end := request.find(b"\r\n\r\n")) < 0:
        request += await reader.read(65536)
    length = re.search(rb"content-length: *(\d+)", request[:end], re.IGNORECASE)
    missing = (int(length[1]) if length else 0) - (len(request) - end - 4)
    if missing > 0:
        await reader.readexactly(missing)
