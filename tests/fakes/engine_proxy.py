"""A door before the Docker Engine's socket that can be shut: refuse, hang, answer nothing, drop."""

from __future__ import annotations

import asyncio
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


class EngineProxy:
    """`async with EngineProxy(path) as proxy`: DOCKER_HOST is `proxy.url`."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.door = Door.OPEN
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
                self._copy(reader, engine_writer, {Door.OPEN, Door.MUTE}),
                self._copy(engine_reader, writer, {Door.OPEN}),
            )
        finally:
            for end in (writer, engine_writer):
                end.close()
                self._writers.discard(end)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: set[Door]) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                if self.door not in passing:
                    continue  # lost
                writer.write(chunk)
                await writer.drain()
        writer.close()
