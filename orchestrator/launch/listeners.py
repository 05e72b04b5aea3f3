"""Serves what connects to a socket in a sandbox, from outside."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import socket

from orchestrator.errors import RolloutError
from orchestrator.types import Way

log = logging.getLogger(__name__)

MAX_STREAMS = 256  # of one place at a time


@asynccontextmanager
async def serving(listener: socket, way: Way) -> AsyncIterator[None]:
    """What comes to the socket goes that way. The socket is closed; on any exit, all connections are."""
    streams = set[asyncio.Task[None]]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(streams) > MAX_STREAMS:
                return
            await way.carry(reader, writer)
            writer.close()
        except (OSError, RolloutError) as error:  # whoever connected is told by a reset
            log.debug("a stream to %s: %s", way.listener, error)
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(carry(reader, writer), name="stream of a service")
        streams.add(task)
        task.add_done_callback(streams.discard)

    server = await asyncio.start_server(begin, sock=listener)
    try:
        yield
    finally:
        server.close()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
