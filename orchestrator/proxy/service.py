"""The RPCs: check the lease, convert, call, convert, return. No logic of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.leases import Lease, Reply, SequenceError, ToolReply
from orchestrator.tasks.attachments import open_attachment
from orchestrator.types import Attachment, Confinement

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class SandboxService(pb_grpc.SandboxServiceServicer):
    """What one sandbox can call. Holds the one lease of its socket."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.parked: asyncio.Future[Confinement] = loop.create_future()
        self.assigned: asyncio.Future[Lease] = loop.create_future()
        self.started = asyncio.Event()

    async def Park(self, request: pb.ParkRequest, context: Context) -> AsyncIterator[pb.ParkResponse]:
        if self.parked.done():
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "parked already")
        try:
            self.parked.set_result(wire.confinement(request))
        except ProtocolError as error:
            self.parked.set_exception(error)
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        lease = await asyncio.shield(self.assigned)
        task = lease.plan.task
        yield pb.ParkResponse(assignment=wire.assignment(task, lease.plan.agent, lease.tools))
        for index, attachment in enumerate(task.attachments):
            try:
                async for content in _chunks(attachment):
                    yield pb.ParkResponse(chunk=pb.AttachmentChunk(index=index, content=content))
            except OSError as error:
                lease.refuse("bad_task", f"attachment {attachment.name!r} cannot be read: {error.strerror}")
                await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "the task cannot be sent")
        yield pb.ParkResponse(start=pb.Start())
        lease.clock.start()

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        lease = await self._lease(context, request.ByteSize())
        try:
            kind, messages = wire.completion_request(request)
            reply = await lease.complete(request.sequence, request.SerializeToString(), kind, messages)
        except ProtocolError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SequenceError as error:
            await _refuse(context, grpc.StatusCode.ABORTED, str(error))
        response = wire.completion_response(reply)
        if reply.ended is None and not lease.carry(response.ByteSize()):
            response = wire.completion_response(Reply(ended="budget"))
        return response

    async def CallTool(self, request: pb.CallToolRequest, context: Context) -> pb.CallToolResponse:
        lease = await self._lease(context, request.ByteSize())
        try:
            name, arguments = wire.tool_request(request)
            reply = await lease.call_tool(request.sequence, request.SerializeToString(), name, arguments)
        except ProtocolError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SequenceError as error:
            await _refuse(context, grpc.StatusCode.ABORTED, str(error))
        response = wire.tool_response(reply)
        if reply.ended is None and not lease.carry(response.ByteSize()):
            response = wire.tool_response(ToolReply(ended="budget"))
        return response

    async def RecordStep(self, request: pb.RecordStepRequest, context: Context) -> pb.RecordStepResponse:
        lease = await self._lease(context, request.ByteSize())
        lease.record_step(wire.step(request))
        return pb.RecordStepResponse()

    async def SubmitResult(self, request: pb.SubmitResultRequest, context: Context) -> pb.SubmitResultResponse:
        lease = await self._lease(context, 0)  # the last call there is; its size has limits of its own
        try:
            lease.submit(wire.submission(request))
        except ProtocolError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.SubmitResultResponse()

    async def _lease(self, context: Context, size: int) -> Lease:
        """The live lease behind this socket, a request of `size` bytes counted; or FAILED_PRECONDITION."""
        if not self.assigned.done() or self.assigned.cancelled() or not self.assigned.result().live:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "no live lease")
        lease = self.assigned.result()
        if not lease.carry(size):
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "budget")
        return lease


async def _chunks(attachment: Attachment) -> AsyncIterator[bytes]:
    """The file in pieces, read off the event loop. Raises OSError, also for a file that changed."""
    file = await asyncio.to_thread(open_attachment, attachment)
    try:
        left = attachment.size_bytes
        while left > 0:
            content = await asyncio.to_thread(file.read, min(wire.CHUNK_BYTES, left))
            if not content:
                raise OSError(None, "it is shorter than it was")
            left -= len(content)
            yield content
    finally:
        file.close()


async def _refuse(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text[:500])
    raise AssertionError("unreachable: abort raises")
