"""The RPCs of one sandbox. Each waits its turn, checks the lease and converts between `wire` and `lease`.

Park also sends the assignment with its attachments. The rollout's clock starts with it, or when the sandbox says
that the task's healthcheck has succeeded. A flood of calls, or more bytes
than allowed, ends the lease. Requests arrive as bytes: `wire` checks them before they are parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.instructions import needs_setup, result_response
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.numbered_calls import SequenceError
from orchestrator.proxy.pace import CALLS_PER_S, Pace
from orchestrator.proxy.requests import AgentRequest, Reply, ToolReply
from orchestrator.rules.waits import aside
from orchestrator.tasks.attachments import open_attachment
from orchestrator.types import Attachment, Confinement

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"].full_name


class SandboxService(grpc.GenericRpcHandler):
    """The RPCs that one sandbox can call, under its socket's one lease. `on_park` is called when it connects."""

    def __init__(self, on_park: Callable[[], None] = lambda: None) -> None:
        self._on_park = on_park
        loop = asyncio.get_running_loop()
        self.parked: asyncio.Future[Confinement] = loop.create_future()
        self.assigned: asyncio.Future[Lease] = loop.create_future()
        self.hung_up = asyncio.Event()
        self._pace = Pace()

    def close(self) -> None:
        """Stops serving. Idempotent."""
        for future in (self.parked, self.assigned):
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # marked as retrieved, so that asyncio does not report it
        # gRPC keeps this object until a garbage collection; the lease with its record must be freed before.
        self.assigned = asyncio.get_running_loop().create_future()
        self.assigned.cancel()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of a call. gRPC asks for every call, also for one it will refuse."""
        if self._pace.count():
            self._end_flood()
        name = handler_call_details.method.removeprefix(f"/{SERVICE}/")
        if name not in _METHODS:
            return None
        # Made for each call: kept handlers would keep this object alive until a garbage collection.
        kind, response = _METHODS[name]
        return kind(getattr(self, name), response_serializer=response.SerializeToString)

    def _end_flood(self) -> None:
        log.warning("a sandbox floods its socket with calls")
        if self.assigned.done() and not self.assigned.cancelled():
            self.assigned.result().refuse("budget", f"{CALLS_PER_S:g} calls per second")

    async def Park(self, request: bytes, context: Context) -> AsyncIterator[pb.ParkResponse]:
        if self.parked.done():
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "parked already")
        self._on_park()
        try:
            self.parked.set_result(wire.confinement(request))
        except ProtocolError as error:
            self.parked.set_exception(error)
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            lease = await asyncio.shield(self.assigned)
        except asyncio.CancelledError:  # the sandbox hung up
            self.hung_up.set()
            raise
        task = lease.plan.task
        assignment = wire.assignment(
            task,
            lease.plan.agent,
            lease.tools,
            lease.equipment,
            lease.output.rule,
            parallel=lease.completions.parallel,
            max_token_length=lease.plan.limits.max_token_length,
            world=lease.world,
        )
        yield pb.ParkResponse(assignment=assignment)
        for index, attachment in enumerate(task.attachments):
            try:
                async for content in _chunks(attachment):
                    yield pb.ParkResponse(chunk=pb.AttachmentChunk(index=index, content=content))
            except OSError as error:
                lease.refuse("bad_task", f"attachment {attachment.name!r} cannot be read: {error.strerror}")
                await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "the task cannot be sent")
        yield pb.ParkResponse(start=pb.Start())
        if task.healthcheck is None and not (task.steps and needs_setup(task.steps[0])):
            lease.clock.start()

    async def ReportHealthy(self, request: bytes, context: Context) -> pb.ReportHealthyResponse:
        lease = await self._lease(context, len(request))
        lease.clock.start()
        lease.healthy.set()
        return pb.ReportHealthyResponse()

    async def Complete(self, request: bytes, context: Context) -> pb.CompleteResponse:
        lease = await self._lease(context, len(request))
        async with _Refusing(context):
            short = wire.short_request(request)
            ask, content = (short, request) if short is not None else await aside(_long, request)
            if not lease.live:  # it ended while a long request was read
                await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "no live lease")
            reply = await lease.complete(ask, content)
        response = wire.completion_response(reply)
        if reply.ended is None and not lease.carry(response.ByteSize()):
            response = wire.completion_response(Reply(ended="budget"))
        return response

    async def AbandonCompletion(self, request: bytes, context: Context) -> pb.AbandonCompletionResponse:
        lease = await self._lease(context, len(request))
        async with _Refusing(context):
            await lease.completions.give_up(wire.abandoned(request))
        return pb.AbandonCompletionResponse()

    async def CallTool(self, request: bytes, context: Context) -> pb.CallToolResponse:
        lease = await self._lease(context, len(request))
        async with _Refusing(context):
            sequence, name, arguments = wire.tool_request(request)
            reply = await lease.call_tool(sequence, request, name, arguments)
        response = wire.tool_response(reply)
        if reply.ended is None and not lease.carry(response.ByteSize()):
            response = wire.tool_response(ToolReply(ended="budget"))
        return response

    async def RecordStep(self, request: bytes, context: Context) -> pb.RecordStepResponse:
        lease = await self._lease(context, len(request))
        async with _Refusing(context):
            lease.record_step(wire.step(request))
        return pb.RecordStepResponse()

    async def SendOutput(self, requests: AsyncIterator[bytes], context: Context) -> pb.SendOutputResponse:
        lease = await self._lease(context, 0, ended=True)  # output has its own limit of bytes
        async with _Refusing(context):
            await lease.output.take(wire.output_piece(request) async for request in requests)
        return pb.SendOutputResponse()

    async def SubmitResult(self, request: bytes, context: Context) -> pb.SubmitResultResponse:
        lease = await self._lease(context, 0, ended=True)  # a result has its own limit of bytes
        async with _Refusing(context):
            submission = wire.submission(request)
            if not (lease.live or lease.has_ended_step(submission.step)):
                await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "no live lease")
            return result_response(await lease.submit(submission))
        raise AssertionError("unreachable: abort raises")

    async def Relay(self, requests: AsyncIterator[bytes], context: Context) -> None:
        lease = await self._lease(context, 0, ended=True)  # streams go on while a step is graded
        # gRPC would send them with the first message. If that is cancelled, it can no longer end the call.
        await context.send_initial_metadata(())
        async with _Refusing(context):
            try:
                await lease.relay.serve(requests, context.write)
            except ProtocolError as error:
                lease.refuse("sandbox_crashed", f"the sandbox breaks the contract: {error}")
                raise

    async def _lease(self, context: Context, size: int, *, ended: bool = False) -> Lease:
        """The lease of this socket, which pays for a request of `size` bytes; or FAILED_PRECONDITION.

        `ended`: also a lease that has ended, for calls after the result.
        """
        await self._pace.turn()
        lease = self.assigned.result() if self.assigned.done() and not self.assigned.cancelled() else None
        if lease is None or not (lease.live or ended):
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "no live lease")
        if not lease.carry(size):
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "budget")
        return lease


_METHODS: Mapping[str, tuple[Callable[..., Handler], type[Message]]] = {
    "Park": (grpc.unary_stream_rpc_method_handler, pb.ParkResponse),
    "ReportHealthy": (grpc.unary_unary_rpc_method_handler, pb.ReportHealthyResponse),
    "Complete": (grpc.unary_unary_rpc_method_handler, pb.CompleteResponse),
    "AbandonCompletion": (grpc.unary_unary_rpc_method_handler, pb.AbandonCompletionResponse),
    "CallTool": (grpc.unary_unary_rpc_method_handler, pb.CallToolResponse),
    "RecordStep": (grpc.unary_unary_rpc_method_handler, pb.RecordStepResponse),
    "SendOutput": (grpc.stream_unary_rpc_method_handler, pb.SendOutputResponse),
    "Relay": (grpc.stream_stream_rpc_method_handler, pb.RelayResponse),
    "SubmitResult": (grpc.unary_unary_rpc_method_handler, pb.SubmitResultResponse),
}


def _long(request: bytes) -> tuple[AgentRequest, bytes]:
    """(a long request, what tells it from others). Raises ProtocolError."""
    return wire.completion_request(request), hashlib.sha256(request).digest()


async def _chunks(attachment: Attachment) -> AsyncIterator[bytes]:
    """The file in pieces, read in a thread. Raises OSError, also for a file that has changed."""
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


class _Refusing:
    """Within this block an invalid request ends the call."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ProtocolError):
            await _refuse(self._context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, SequenceError):
            await _refuse(self._context, grpc.StatusCode.ABORTED, str(error))


async def _refuse(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text[:500])
    raise AssertionError("unreachable: abort raises")
