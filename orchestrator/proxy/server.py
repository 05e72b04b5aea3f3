"""One gRPC server on one Unix socket per sandbox: the only way out of the sandbox.

`context.peer()` is the same for every Unix socket, so one server on many sockets could not tell sandboxes apart. A
server costs 30 KB and a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio

from orchestrator.errors import EnvironmentUnusable, LaunchError, ProtocolError
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.proxy.door import Door
from orchestrator.proxy.lease import TOOL_CALLS_TOGETHER, Lease
from orchestrator.proxy.service import SandboxService
from orchestrator.proxy.wire import MAX_REQUEST_BYTES
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import MAX_PARALLEL_COMPLETIONS, Confinement

log = logging.getLogger(__name__)

MAX_SEND_BYTES = 8 << 20
STOP_GRACE_S = 0.05  # time to send the answer to SubmitResult
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", MAX_PARALLEL_COMPLETIONS + TOOL_CALLS_TOGETHER + 10),
    # Without this limit one sandbox could hold a thousand of our file descriptors.
    ("grpc.max_allowed_incoming_connections", 2),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 4),
    ("grpc.so_reuseport", 0),
)
_MAX_RPCS = MAX_PARALLEL_COMPLETIONS + TOOL_CALLS_TOGETHER + 8  # two of Relay, when one takes the place of another


class SandboxServer:
    """`async with SandboxServer(directory) as server`: serves `directory/s` until the block is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / SOCKET_NAME
        self._door = Door(self._path)
        self._service = SandboxService(on_park=self._door.shut)
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_RPCS)
        self._lease: Lease | None = None

    async def __aenter__(self) -> SandboxServer:
        self._server.add_generic_rpc_handlers((self._service,))
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
            await uninterrupted(self._server.start())  # a server that is cancelled in its start cannot be stopped
            self._door.open()
        except BaseException as error:  # also a cancel
            await uninterrupted(self._server.stop(None))
            if isinstance(error, (RuntimeError, OSError)):
                raise LaunchError(f"cannot serve {self._path}: {error}") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await uninterrupted(self._close())

    async def _close(self) -> None:
        """Bounded in time. Not to be cut short: a running server holds descriptors and its rollout's record."""
        try:
            if self._lease is not None:
                await self._lease.aclose()
                self._lease = None
        finally:
            self._service.close()
            await self._server.stop(STOP_GRACE_S)
            await self._door.aclose()

    async def parked(self) -> Confinement:
        """Waits until the sandbox is ready for an assignment. EnvironmentUnusable: its image does not fit this
        version."""
        try:
            return await asyncio.shield(self._service.parked)
        except ProtocolError as error:
            raise EnvironmentUnusable(str(error)) from error

    @property
    def connected(self) -> bool:
        """Whether the sandbox that parked still waits for its assignment."""
        return self._service.parked.done() and not self._service.hung_up.is_set()

    async def hung_up(self) -> str:
        """Waits until the parked sandbox hangs up without an assignment. Returns that as text."""
        await self._service.hung_up.wait()
        return "it hung up"

    def assign(self, lease: Lease) -> None:
        """Gives the sandbox its one rollout. The server closes the lease when its block is left."""
        if self._service.assigned.done():
            raise AssertionError("a sandbox is used for one rollout")
        self._lease = lease
        self._service.assigned.set_result(lease)
