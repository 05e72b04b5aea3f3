"""Streams from one sandbox of a rollout into another, by hand of the orchestrator: neither has a network."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from orchestrator.launch.base import ServingSandbox
from orchestrator.launch.listeners import serving
from orchestrator.types import Listener, Way

_PIECE_BYTES = 64 << 10


class ServiceWay:
    """A `Way` to a port of a service. `source`: where connections seem to come from, there."""

    def __init__(self, listener: Listener, sandbox: ServingSandbox, port: int, source: str) -> None:
        self.listener = listener
        self._sandbox, self._port, self._source = sandbox, port, source

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, to its end. Raises OSError, LaunchError where nobody listens."""
        made = await self._sandbox.connected(self._port, self._source)
        there_reader, there_writer = await asyncio.open_connection(sock=made)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_carried(reader, there_writer))
                both.create_task(_carried(there_reader, writer))
        except* OSError as errors:
            raise errors.exceptions[0] from None
        finally:
            there_writer.transport.abort()


async def _carried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until its end, which is passed on."""
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    with suppress(OSError, RuntimeError, NotImplementedError):  # closed meanwhile
        writer.write_eof()


@asynccontextmanager
async def served(sandbox: ServingSandbox, ways: Sequence[Way]) -> AsyncIterator[None]:
    """Within the block the sandbox finds what these lead to at its loopback. Raises LaunchError."""
    async with AsyncExitStack() as stack:
        for way in ways:
            listener = await sandbox.listening(way.listener.address, way.listener.port)
            await stack.enter_async_context(serving(listener, way))
        yield
