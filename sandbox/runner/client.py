"""The channel to the orchestrator: deadlines, retries, sequence numbers. The only gRPC in the sandbox.

A call that finds the orchestrator unavailable is repeated with the same sequence number: if the
orchestrator answered it before, it answers the same. The sandbox ends when this fails for RECONNECT_S, or
when nobody listens for PARK_S at its start.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc._channel  # the first channel would import it later
import grpc._common
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from sandbox.errors import ChannelLost, ClientGone, EpisodeCrashed, LeaseEnded, RequestRefused, ToolFailure
from sandbox.runner import wire
from sandbox.types import (
    Assignment,
    Box,
    Completion,
    Kind,
    Message,
    NextStep,
    Request,
    Result,
    StepReport,
    Tools,
)

PARK_S = 60.0  # an orchestrator that stands still may go on; one that is gone ends the sandbox by its tether
RECONNECT_S = 10.0
SUBMIT_LIMIT_S = 60.0
RECORD_LIMIT_S = 10.0
OUTPUT_LIMIT_S = 60.0
MAX_ARGUMENT_BYTES = 256 * 1024
TOOL_CALLS_TOGETHER = 16  # of a program; the orchestrator answers no more at a time
# How many steps may wait for the next request to travel with; the orchestrator takes 64 KiB of them.
STEPS, STEPS_BYTES = 8, 60 * 1024

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, also how long a connection attempt may take: on a crowded machine that may be long.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A frozen orchestrator keeps its socket open; only pings show that it is frozen.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)
_PAUSE_S = 0.1
# gRPC's waits look ten times a second whether a signal has come, though Python's own need no looking: thousands of
# parked sandboxes would take all CPUs with it.
grpc._common.MAXIMUM_WAIT_TIMEOUT = 10.0
# RESOURCE_EXHAUSTED: too many calls; after a reconnection the server may still be busy with the call that was cut.
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
R = TypeVar("R")


class Client:
    """`with Client(box) as client`: this sandbox's conversation with the orchestrator.

    Completions and tool calls have no deadline here: the orchestrator limits them, and a task's own deadline may
    be a week.
    """

    def __init__(self, box: Box) -> None:
        self._box = box
        self._channel = grpc.insecure_channel(f"unix:{box.socket}", options=_OPTIONS)
        self._stub = pb_grpc.SandboxServiceStub(self._channel)
        self._numbering = threading.Lock()  # a program's requests come from several threads
        self._completions = 0
        self._tool_calls = 0
        self._tool_places = threading.Semaphore(TOOL_CALLS_TOGETHER)
        self._steps: list[pb.RecordStepRequest] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def park(self, confinement: pb.Confinement) -> Iterator[pb.ParkResponse]:
        """Waits for an assignment, yields it and its files. Raises ChannelLost, LeaseEnded, EpisodeCrashed."""

        def begin() -> Iterator[pb.ParkResponse]:
            grpc.channel_ready_future(self._channel).result(timeout=PARK_S)
            return self._stub.Park(pb.ParkRequest(contract=wire.CONTRACT, confinement=confinement))

        stream = self._call(begin)  # a stream that has begun is never begun again
        try:
            yield from stream
        except grpc.RpcError as error:
            raise _end(error) from error

    def report_healthy(self) -> None:
        """The task's healthcheck has succeeded. Raises LeaseEnded, ChannelLost, EpisodeCrashed."""
        self._call(lambda: self._stub.ReportHealthy(pb.ReportHealthyRequest(), timeout=SUBMIT_LIMIT_S))

    def complete(
        self, kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()
    ) -> Completion:
        """One completion, for a managed agent if it is named. Raises LeaseEnded, ChannelLost, EpisodeCrashed."""
        try:
            return self.answer(Request(messages, tools=tools), kind, agent)
        except RequestRefused as refused:
            raise EpisodeCrashed(f"the orchestrator refused a request: {refused}") from refused

    def answer(
        self, request: Request, kind: Kind = "action", agent: str = "", program: socket.socket | None = None
    ) -> Completion:
        """One completion. `program`: the connection of the program that asked. Raises as `complete`; ClientGone if
        that connection was closed before the completion was there, and RequestRefused: after these two, others may
        be asked for."""
        with self._numbering:
            self._completions += 1
            call_request = wire.complete_request(self._completions, kind, request, agent)
        call_request.steps.extend(self._ended_steps())
        response = self._call(lambda: self._completed(call_request, program))
        match response.WhichOneof("result"):
            case "completion":
                return wire.completion(response.completion)
            case "refused":
                raise wire.refused(response.refused)
        raise LeaseEnded(response.ended.outcome)

    def _completed(self, call_request: pb.CompleteRequest, program: socket.socket | None) -> pb.CompleteResponse:
        """Raises ClientGone, grpc.RpcError."""
        if program is None:
            return self._stub.Complete(call_request)
        bell, ring = socket.socketpair()
        with bell, ring:
            call = self._stub.Complete.future(call_request)
            call.add_done_callback(lambda _: _ring(ring))
            poll = select.poll()
            poll.register(bell, select.POLLIN)
            poll.register(program, select.POLLRDHUP)
            poll.poll()
            if not hung_up(program):
                return call.result()
            self._call(
                lambda: self._stub.AbandonCompletion(pb.AbandonCompletionRequest(sequence=call_request.sequence))
            )
            call.cancel()
        raise ClientGone

    def call_tool(self, name: str, arguments_json: str, program: socket.socket | None = None) -> str:
        """The tool's output. `program`: the connection of the program that asked. Raises ToolFailure, LeaseEnded,
        ChannelLost, EpisodeCrashed; ClientGone if that connection was closed before the tool was called.

        A call that was begun is waited for, also when nobody reads its result: the orchestrator is busy with it.
        """
        if len(arguments_json) > MAX_ARGUMENT_BYTES:
            raise ToolFailure(f"{name}(): arguments of more than {MAX_ARGUMENT_BYTES} bytes")
        with self._tool_places:
            if program is not None and hung_up(program):  # while it waited for its place
                raise ClientGone
            with self._numbering:
                self._tool_calls += 1
                number = self._tool_calls
            request = pb.CallToolRequest(sequence=number, name=name, arguments_json=arguments_json)
            response = self._call(lambda: self._stub.CallTool(request))
        match response.WhichOneof("result"):
            case "output":
                return response.output
            case "error":
                raise ToolFailure(response.error)
        raise LeaseEnded(response.ended.outcome)

    def record_step(self, step: StepReport) -> None:
        """Queues a step for the next request: a call of its own would hold the agent up. A full queue is sent at
        once. Nothing depends on steps: a failure is a line on stderr."""
        with self._numbering:
            self._steps.append(wire.step_request(step))
            if sum(one.ByteSize() for one in self._steps) < STEPS_BYTES and len(self._steps) < STEPS:
                return
        for request in self._ended_steps():
            try:
                self._stub.RecordStep(request, timeout=RECORD_LIMIT_S)
            except grpc.RpcError as error:
                print(
                    f"step {request.step_number} was not recorded: {_reason(error)}", file=sys.stderr, flush=True
                )

    def _ended_steps(self) -> list[pb.RecordStepRequest]:
        """Takes the queued steps."""
        with self._numbering:
            steps, self._steps = self._steps, []
        return steps

    def send_output(self, chunks: Iterator[bytes]) -> None:
        """Sends the stream of output files. Nothing depends on it: a failure is a line on stderr."""
        try:
            self._stub.SendOutput(
                (pb.SendOutputRequest(content=chunk) for chunk in chunks), timeout=OUTPUT_LIMIT_S
            )
        except grpc.RpcError as error:
            print(f"the output was not taken: {_reason(error)}", file=sys.stderr, flush=True)

    def submit(self, result: Result, duration_s: float, step: int = 1, *, last: bool = True) -> NextStep | None:
        """Ends a step, and returns the next one; None: the episode has ended. Raises LeaseEnded, ChannelLost,
        EpisodeCrashed. `last`: of the task's. Another one is graded first, and all in the sandbox stands still."""
        request = wire.result_request(result, duration_s, step)
        request.steps.extend(self._ended_steps())
        limit_s = SUBMIT_LIMIT_S if last else None
        return wire.next_step(self._call(lambda: self._stub.SubmitResult(request, timeout=limit_s)))

    def relay(self, requests: Iterator[pb.RelayRequest]) -> Iterator[pb.RelayResponse]:
        """Frames to and from the orchestrator. Raises grpc.RpcError when it ends; one call, never repeated."""
        return self._stub.Relay(requests)

    def _call(self, attempt: Callable[[], R]) -> R:
        unavailable_since: float | None = None
        while True:
            try:
                return attempt()
            except grpc.FutureTimeoutError as error:
                raise ChannelLost(f"no orchestrator listens at {self._box.socket}") from error
            except grpc.RpcError as error:
                now = time.monotonic()
                unavailable_since = unavailable_since or now
                if error.code() not in _AGAIN or now - unavailable_since > RECONNECT_S:
                    raise _end(error) from error
            time.sleep(_PAUSE_S)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end was closed. Does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _ring(bell: socket.socket) -> None:
    """Nobody listens any more where the call was given up before."""
    with suppress(OSError):
        bell.send(b"!")


def assigned(first: pb.ParkResponse) -> Assignment:
    """The assignment that opens the stream. Raises EpisodeCrashed."""
    if first.WhichOneof("item") != "assignment":
        raise EpisodeCrashed("the stream does not begin with an assignment")
    try:
        return wire.assignment(first.assignment)
    except ValueError as error:
        raise EpisodeCrashed(f"an assignment that cannot be used: {error}") from error


def _end(error: Any) -> LeaseEnded | ChannelLost | EpisodeCrashed:
    match error.code():
        case grpc.StatusCode.FAILED_PRECONDITION:
            return LeaseEnded(error.details())
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ChannelLost(f"the orchestrator is gone: {_reason(error)}")
    return EpisodeCrashed(f"the orchestrator refused a call: {_reason(error)}")


def _reason(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"
