"""The gRPC service on a real Unix socket, called as a sandbox calls it and as an attacker would."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.completion.base import CompletionRequest
from orchestrator.proxy import service
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.pace import BURST
from orchestrator.proxy.server import SandboxServer
from orchestrator.proxy.service import SERVICE
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.outcome import Refused, Submission
from orchestrator.rules.waits import aside
from orchestrator.types import Attachment, Completion, Grader, Healthcheck, Task, TaskStep
from sandbox.runner.client import Client
from sandbox.types import Box, Message, Result, StepReport
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, some_limits

Stub = pb_grpc.SandboxServiceStub
A_CONFINEMENT = pb.Confinement(no_new_privileges=True, seccomp_mode=2, root_read_only=True, process_id=1)
MESSAGES = [pb.Message(role=pb.ROLE_SYSTEM, content=TALK[0].content), pb.Message(role=pb.ROLE_USER, content="?")]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SandboxServer]:
    async with SandboxServer(tmp_path) as running:
        yield running


@pytest.fixture
async def stub(server: SandboxServer) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(f"unix:{server.directory}/s") as channel:
        yield Stub(channel)


def lease(script: list[str | Exception] | None = None, **changes: object) -> Lease:
    return Lease(a_plan(**changes), ScriptedCompleter(script or ["Thought\n<code>\n1\n</code>"]), None, {})


async def parked(stub: Stub, server: SandboxServer, given: Lease) -> list[pb.ParkResponse]:
    stream = stub.Park(pb.ParkRequest(contract=CONTRACT))
    await asyncio.wait_for(server.parked(), 120)
    server.assign(given)
    return [item async for item in stream]


def a_step(number: int, output: str = "") -> StepReport:
    return StepReport(number, output, "", "", "", "", False, 0.1)


async def code_of(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return refused.value.code()


def complete(sequence: int = 1, **changes: object) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        **({"sequence": sequence, "kind": pb.COMPLETION_KIND_ACTION, "messages": MESSAGES} | changes)
    )


async def test_an_assignment_streams_the_task_and_its_files_but_never_the_answer(
    stub: Stub, server: SandboxServer, tmp_path: Path
) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 3000)
    task = Task(
        "id", "question", "the-secret-answer", (Attachment("d ä.bin", path, 768_000),), metadata={"a": "b"}
    )
    items = await parked(stub, server, lease(task=task))
    assert items[0].assignment.question == "question"
    assert items[0].assignment.attachments[0].name == "d ä.bin"
    assert b"".join(i.chunk.content for i in items if i.HasField("chunk")) == path.read_bytes()
    assert items[-1].HasField("start")
    assert b"the-secret-answer" not in b"".join(i.SerializeToString() for i in items)


async def test_a_file_that_shrank_is_a_bad_task(stub: Stub, server: SandboxServer, tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * 100)
    given = lease(task=Task("id", "question", "1", (Attachment("data.bin", path, 200),)))
    with pytest.raises(grpc.aio.AioRpcError):
        await parked(stub, server, given)
    assert (await given.ended()).name == "bad_task"  # type: ignore[union-attr]


async def test_a_healthcheck_is_on_no_clock(stub: Stub, server: SandboxServer) -> None:
    check = Healthcheck("pg_ctl start", interval_s=0.5, retries=7, as_root=True)
    given = lease(task=Task("id", "question", "1", healthcheck=check))
    items = await parked(stub, server, given)
    told = items[0].assignment.healthcheck
    assert (told.command, told.retries, told.as_root, told.timeout.seconds) == ("pg_ctl start", 7, True, 30)
    assert items[-1].HasField("start")
    started = asyncio.ensure_future(given.clock.started())
    await asyncio.sleep(0.05)
    assert (given.clock.elapsed_s, started.done()) == (0, False)
    await stub.ReportHealthy(pb.ReportHealthyRequest())
    await started
    await asyncio.sleep(0.05)
    elapsed_s = given.clock.elapsed_s
    assert elapsed_s > 0
    await stub.ReportHealthy(pb.ReportHealthyRequest())
    assert given.clock.elapsed_s >= elapsed_s, "a repetition gives no time"


def of_steps(number: int = 2) -> Task:
    graders = [Grader("command", command=("true",)) for _ in range(number)]
    steps = [TaskStep(f"s{n}", f"question {n}", grader) for n, grader in enumerate(graders)]
    return Task("id", "question 0", grader=graders[0], steps=tuple(steps))


async def test_a_step_is_answered_when_it_is_graded_and_a_repetition_gets_the_same(
    stub: Stub, server: SandboxServer
) -> None:
    given = lease(task=of_steps())
    items = await parked(stub, server, given)
    assert items[0].assignment.steps == 2
    done = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"1", step=1)
    for skip in (2, 3, 99):
        ahead = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, step=skip)
        assert await code_of(stub.SubmitResult(ahead, timeout=20)) is grpc.StatusCode.INVALID_ARGUMENT
    assert given.live, "nothing was skipped"
    first = asyncio.ensure_future(stub.SubmitResult(done))
    assert isinstance(ended := await given.ended(), Submission)
    assert (ended.step, ended.answer) == (1, b"1")
    second = asyncio.ensure_future(stub.SubmitResult(done))
    assert await code_of(stub.Complete(complete())) is grpc.StatusCode.FAILED_PRECONDITION, "while it is graded"
    assert [first.done(), second.done()] == [False, False]
    given.go_on(given.plan.task.steps[1])
    later = await stub.SubmitResult(done)
    for answer in (await first, await second, later):
        assert answer.next.question == "question 1"
    assert (await stub.Complete(complete())).HasField("completion")
    last = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"2", step=2)
    assert not (await stub.SubmitResult(last)).HasField("next")
    assert await code_of(stub.SubmitResult(last)) is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_task_may_end_with_any_step(stub: Stub, server: SandboxServer) -> None:
    given = lease(task=of_steps())
    await parked(stub, server, given)
    done = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_MAX_STEPS)
    answer = asyncio.ensure_future(stub.SubmitResult(done))
    await given.ended()
    given.finish()
    assert not (await answer).HasField("next")
    assert not (await stub.SubmitResult(done)).HasField("next")
    assert not given.live


async def test_each_step_has_a_time_of_its_own() -> None:
    task = of_steps()
    task = replace(task, steps=(replace(task.steps[0], timeout_s=5.0), replace(task.steps[1], timeout_s=7.0)))
    given = lease(task=task)
    assert given.deadline_s == 5
    given.refuse("max_steps", "")
    given.go_on(task.steps[1])
    assert given.deadline_s == 7


async def test_only_one_park_is_served(stub: Stub, server: SandboxServer) -> None:
    await parked(stub, server, lease())
    assert (
        await code_of(anext(aiter(stub.Park(pb.ParkRequest(contract=CONTRACT)))))
        is grpc.StatusCode.FAILED_PRECONDITION
    )


async def test_an_image_of_another_contract_is_refused(stub: Stub, server: SandboxServer) -> None:
    call = asyncio.ensure_future(code_of(anext(aiter(stub.Park(pb.ParkRequest(contract=99))))))
    with pytest.raises(Exception, match="image build"):
        await asyncio.wait_for(server.parked(), 120)
    assert await call is grpc.StatusCode.INVALID_ARGUMENT


async def test_nothing_is_served_before_the_assignment(stub: Stub) -> None:
    assert await code_of(stub.Complete(complete())) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code_of(stub.SubmitResult(pb.SubmitResultRequest())) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (complete(kind=0), grpc.StatusCode.INVALID_ARGUMENT),
        (complete(messages=[]), grpc.StatusCode.INVALID_ARGUMENT),
        (complete(messages=[pb.Message(role=0, content="x")]), grpc.StatusCode.INVALID_ARGUMENT),
        (complete(messages=[pb.Message(role=1, content="x")] * 2001), grpc.StatusCode.INVALID_ARGUMENT),
        (complete(sequence=0), grpc.StatusCode.ABORTED),
        (complete(sequence=7), grpc.StatusCode.ABORTED),
        (complete(messages=[pb.Message(role=1, content="x" * (5 << 20))]), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_malformed_requests_are_refused_and_leave_no_trace(
    stub: Stub, server: SandboxServer, request_: pb.CompleteRequest, code: grpc.StatusCode
) -> None:
    given = lease()
    await parked(stub, server, given)
    assert await code_of(stub.Complete(request_)) is code
    assert given.turns == []
    assert (await stub.Complete(complete())).completion.text.startswith("Thought")


async def test_after_the_result_the_socket_serves_nothing(stub: Stub, server: SandboxServer) -> None:
    given = lease()
    await parked(stub, server, given)
    result = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"42")
    await stub.SubmitResult(result)
    assert await given.ended() == Submission("final_answer", b"42", "")
    forged = pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"43")
    for call in (stub.SubmitResult(forged), stub.Complete(complete()), stub.RecordStep(pb.RecordStepRequest())):
        assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert given.turns == []


async def test_an_unknown_stop_reason_is_refused(stub: Stub, server: SandboxServer) -> None:
    given = lease()
    await parked(stub, server, given)
    for reason in (0, 99):
        call = stub.SubmitResult(pb.SubmitResultRequest(stop_reason=reason))  # type: ignore[arg-type]
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert given.live


async def test_tool_arguments_must_be_a_json_object(stub: Stub, server: SandboxServer) -> None:
    given = lease()
    await parked(stub, server, given)
    for arguments in ("[1]", "{", '{"x": NaN}', "[" * 100_000, " " * 300_000):
        call = stub.CallTool(pb.CallToolRequest(sequence=1, name="web_search", arguments_json=arguments))
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    reply = await stub.CallTool(pb.CallToolRequest(sequence=1, name="web_search", arguments_json="{}"))
    assert reply.error == "there is no tool 'web_search'"


async def test_steps_are_kept_for_display_and_bounded(stub: Stub, server: SandboxServer) -> None:
    given = lease()
    await parked(stub, server, given)
    for number in range(40):
        await stub.RecordStep(pb.RecordStepRequest(step_number=number, observations="x" * 100_000))
    assert 10 <= len(given.steps) < 40
    assert max(len(step.observations) for step in given.steps) == 64 * 1024


async def test_a_request_that_is_repeated_or_refused_shows_its_steps_no_second_time(
    stub: Stub, server: SandboxServer
) -> None:
    given = lease()
    await parked(stub, server, given)
    steps = [pb.RecordStepRequest(step_number=1, observations="x" * 65_000, error_type="é" * 210)]
    assert await code_of(stub.Complete(complete(kind=99, steps=steps))) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(stub.Complete(complete(9, steps=steps))) is grpc.StatusCode.ABORTED
    for _ in range(2):
        await stub.Complete(complete(steps=steps))
    assert [(step.step_number, step.error_type) for step in given.steps] == [(1, "é" * 200)]


async def test_a_sandbox_shows_its_steps_with_its_next_request(server: SandboxServer, tmp_path: Path) -> None:
    """But those too long for it, and those that are too many, go at once."""
    given = lease(["1", "2"])

    def shown() -> list[int]:
        return [step.step_number for step in given.steps]

    def episode() -> None:
        with Client(Box(server.directory, tmp_path, tmp_path, None, 8)) as client:
            for _ in client.park(A_CONFINEMENT):
                pass
            client.record_step(a_step(1))
            assert shown() == []
            client.complete("action", (Message("user", "?"),))
            assert shown() == [1]
            client.record_step(a_step(2))
            client.record_step(a_step(3, "x" * 61_500))
            assert shown() == [1, 2, 3]
            client.complete("action", (Message("user", "y" * ((4 << 20) - 64)),))
            for number in range(4, 13):
                client.record_step(a_step(number, "x" * 5_000))
            assert shown() == list(range(1, 12))
            client.submit(Result("final_answer", b"z" * 65_536, "d" * 4096), 0.1)

    episode_over = asyncio.create_task(asyncio.to_thread(episode))
    await asyncio.wait_for(server.parked(), 60)
    server.assign(given)
    await asyncio.wait_for(episode_over, 60)
    assert shown() == list(range(1, 13))
    assert len(given.turns) == 2
    assert not given.live


async def test_a_budget_that_is_used_up_is_told_by_name(stub: Stub, server: SandboxServer) -> None:
    await parked(stub, server, lease(limits=some_limits(completions=1)))
    await stub.Complete(complete(1))
    assert (await stub.Complete(complete(2))).ended.outcome == "budget"


async def test_a_request_of_a_million_empty_messages_is_refused_unparsed(
    server: SandboxServer, stub: Stub
) -> None:
    await parked(stub, server, lease())
    async with grpc.aio.insecure_channel(f"unix:{server.directory}/s") as channel:
        for method, data, told in (
            ("Complete", b"\x1a\0" * 1_900_000, "more than"),
            ("Complete", b"\x1a\x04\x52\x02hi", "Message has no field 10"),
            ("Complete", b"\x1a\x7fshort", "longer than its message"),
            ("SubmitResult", b"\x12" + b"\xff" * 20, "without an end"),
            ("SubmitResult", b"\x08\x01" * 300, "more than 256 fields"),
            ("RecordStep", b"\x12\x80\x80\xc0\x01" + bytes(3 << 20), "at most"),
            ("CallTool", b"\x12\x02\xff\xff", "no CallToolRequest"),
        ):
            call = channel.unary_unary(f"/{SERVICE}/{method}")
            with pytest.raises(grpc.aio.AioRpcError, match=told) as refused:
                await call(data)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await stub.Complete(complete())).completion.text


async def test_a_flood_of_abandoned_calls_ends_the_rollout_as_over_its_budget(
    server: SandboxServer, stub: Stub
) -> None:
    given = lease()
    await parked(stub, server, given)

    async def flood() -> None:
        while given.live:
            await asyncio.gather(
                *(stub.RecordStep(pb.RecordStepRequest(), timeout=0.01) for _ in range(8)), return_exceptions=True
            )

    async with asyncio.timeout(120):
        await flood()
    assert await given.ended() == Refused("budget", "50 calls per second")


async def test_calls_past_the_pace_wait_and_are_served(server: SandboxServer, stub: Stub) -> None:
    given = lease()
    await parked(stub, server, given)
    loop = asyncio.get_running_loop()
    started = loop.time()
    for number in range(BURST + 25):
        await stub.RecordStep(pb.RecordStepRequest(step_number=number))
    assert loop.time() - started > 0.3  # 25 calls at 50 a second, whatever refilled meanwhile
    assert len(given.steps) == BURST + 25
    assert given.live


async def test_a_third_connection_is_not_accepted(server: SandboxServer) -> None:
    channels = [
        grpc.aio.insecure_channel(f"unix:{server.directory}/s", options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]

    async def ready(channel: grpc.aio.Channel) -> bool:
        try:
            await asyncio.wait_for(channel.channel_ready(), 1.5)
        except TimeoutError:
            return False
        return True

    try:
        connected = await asyncio.gather(*map(ready, channels))
    finally:
        for channel in channels:
            await channel.close()
    assert sum(connected) <= 2


async def test_what_a_rollout_has_recorded_does_not_wait_for_a_garbage_collection(tmp_path: Path) -> None:
    """Such a collection would hold up all other rollouts' completions."""
    gc.collect()
    gc.disable()
    try:
        async with SandboxServer(tmp_path) as running, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            given = lease()
            await parked(Stub(channel), running, given)
            await Stub(channel).Complete(complete())
            await Stub(channel).SubmitResult(pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_NO_ANSWER))
            await given.ended()
            recorded = weakref.ref(given)
            del given
        await asyncio.sleep(0.1)  # tasks that have ended go a turn later
        assert recorded() is None
    finally:
        gc.enable()


async def test_a_sandbox_waits_for_an_orchestrator_that_is_slow_to_answer(
    server: SandboxServer, tmp_path: Path
) -> None:
    """On a crowded machine the other end of a new connection says nothing for a while."""
    accepted = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await asyncio.sleep(0.5)
        theirs, ours = await asyncio.open_unix_connection(f"{server.directory}/s")
        await asyncio.gather(piped(reader, ours), piped(theirs, writer))

    async def piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            while chunk := await reader.read(65_536):
                writer.write(chunk)

    crowded = tmp_path / "crowded"
    crowded.mkdir()
    box = Box(crowded, tmp_path, tmp_path, None, 8)
    async with await asyncio.start_unix_server(handle, crowded / "s"):
        given = lease()
        with Client(box) as client:
            parking = asyncio.create_task(asyncio.to_thread(lambda: next(client.park(A_CONFINEMENT))))
            await asyncio.wait_for(server.parked(), 60)
            server.assign(given)
            assert (await parking).assignment.question == given.plan.task.question
    assert accepted == 1


async def test_leaving_the_block_closes_socket_and_lease(tmp_path: Path) -> None:
    async with SandboxServer(tmp_path) as server:
        channel = grpc.aio.insecure_channel(f"unix:{tmp_path}/s")
        given = lease()
        await parked(Stub(channel), server, given)
        gone: Callable[[], bool] = lambda: not given.live  # noqa: E731
        assert not gone()
    assert gone()
    assert await code_of(Stub(channel).Complete(complete(), timeout=60)) is grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_a_second_cancel_while_it_closes_leaves_no_server_behind(tmp_path: Path) -> None:
    class SlowToLeave(ScriptedCompleter):
        """An upstream request takes a moment to be cancelled: the second cancel falls into it."""

        async def sample(self, request: CompletionRequest) -> Completion:
            sampling.set()
            try:
                await asyncio.Event().wait()
            finally:
                leaving.set()
                await may_leave.wait()
            raise AssertionError

    sampling, leaving, may_leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
    server = SandboxServer(tmp_path)

    async def rollout() -> None:
        async with server, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            await parked(Stub(channel), server, Lease(a_plan(), SlowToLeave([""]), None, {}))
            await Stub(channel).Complete(complete())

    running = asyncio.create_task(rollout())
    async with asyncio.timeout(60):
        await sampling.wait()
        running.cancel()
        await leaving.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_leave.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    with pytest.raises(OSError, match=r"refused|No such file"):
        await asyncio.open_unix_connection(f"{tmp_path}/s")
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "door"]


async def test_a_request_that_was_being_read_when_the_rollout_ended_is_not_sampled(
    server: SandboxServer, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = lease()
    await parked(stub, server, given)

    async def ends_meanwhile(*work: Any) -> Any:
        given.refuse("budget", "meanwhile")
        return await aside(*work)

    monkeypatch.setattr(service, "aside", ends_meanwhile)
    long = pb.Message(role=pb.ROLE_USER, content="x" * 60_000)
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[long])
    assert await code_of(stub.Complete(request)) is grpc.StatusCode.FAILED_PRECONDITION
    assert given.turns == []
