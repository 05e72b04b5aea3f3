"""Files that follow a result: what the sandbox does with them costs it nothing, and delays its end for so long and
no longer."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.errors import SandboxLostError
from orchestrator.host import rollout
from orchestrator.host.base import Provision
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.proxy.left_files import OutputReceiver, OutputRule
from orchestrator.proxy.wire import CONTRACT
from orchestrator.types import Attempt, Change, Difference, Ended, EndedName, Failed, FailedName, SandboxExit
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.fake_launcher import CONFINED, FakeLauncher
from tests.fakes.plans import a_plan

WHOLE = b"F\0\1x" + (4).to_bytes(8, "big") + b"made"
END = b"E" + bytes(4)


def left() -> SandboxExit:
    return SandboxExit(0, oom_killed=False)


async def stream(*pieces: bytes) -> AsyncIterator[pb.SendOutputRequest]:
    for piece in pieces:
        yield pb.SendOutputRequest(content=piece)


async def attempt(folder: Path, behind: Callable[[Any, FakeLauncher], Any]) -> Attempt:
    """A rollout whose agent answers at once; `behind` is what its sandbox does when the answer is accepted."""
    launcher: FakeLauncher

    async def answers(channel: Path) -> SandboxExit:
        async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
            stub: Any = pb_grpc.SandboxServiceStub(connection)
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
                pass
            messages = [pb.Message(role=pb.ROLE_USER, content="?")]
            await stub.Complete(pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=messages))
            await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"42"))
            await behind(stub, launcher)
        return left()

    launcher = FakeLauncher(answers)

    @contextmanager
    def directory() -> Any:
        place = folder / "c"
        place.mkdir()
        yield place

    around = Resources(
        launcher=launcher,
        completer=ScriptedCompleter(["Thought\n<code>\nfinal_answer(42)\n</code>"]),
        tokenizer=None,
        channel_directory=directory,
    )
    async with asyncio.timeout(60):
        return await run_rollout(a_plan(), around, Provision(OutputRule(folder / "output", 10, 1000)))


async def changed(folder: Path, changes: Difference | Exception | float) -> Attempt:
    """A rollout whose sandbox says this of its changes; a number: so many seconds later."""

    async def behind(stub: Any, launcher: FakeLauncher) -> None:
        (box,) = launcher.live.values()
        box.changed = changes
        await stub.SendOutput(stream(END))

    return await attempt(folder, behind)


async def test_what_a_sandbox_changed_is_on_record(tmp_path: Path) -> None:
    changes = Difference((Change("/etc/motd", "changed", 5, 0o644),), 1, 5)
    done = await changed(tmp_path, changes)
    assert (done.outcome, done.record.changes, done.record.notes) == (Ended(EndedName.FINISHED), changes, ())


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (SandboxLostError("the keeper is gone"), "the keeper is gone"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (60.0, "more than 0.2 s"),
    ],
)
async def test_changes_that_cannot_be_read_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception | float, words: str
) -> None:
    monkeypatch.setattr(rollout, "CHANGES_LIMIT_S", 0.2)
    done = await changed(tmp_path, trouble)
    assert (done.outcome, done.record.answer, done.record.changes) == (Ended(EndedName.FINISHED), "42", None)
    (note,) = done.record.notes
    assert words in note


async def test_files_that_follow_the_result_come_back(tmp_path: Path) -> None:
    async def send(stub: Any, launcher: FakeLauncher) -> None:
        await stub.SendOutput(stream(WHOLE, END))

    done = await attempt(tmp_path, send)
    assert (done.outcome, done.record.answer) == (Ended(EndedName.FINISHED), "42")
    assert done.record.output is not None
    assert [file.path for file in done.record.output.files] == ["x"]
    assert done.record.output.complete


async def test_nothing_else_is_served_behind_the_result(tmp_path: Path) -> None:
    refused: list[grpc.StatusCode] = []

    async def ask(stub: Any, launcher: FakeLauncher) -> None:
        messages = [pb.Message(role=pb.ROLE_USER, content="?")]
        for call in (
            stub.Complete(pb.CompleteRequest(sequence=2, kind=pb.COMPLETION_KIND_ACTION, messages=messages)),
            stub.CallTool(pb.CallToolRequest(sequence=1, name="search")),
            stub.RecordStep(pb.RecordStepRequest(step_number=1)),
            stub.SubmitResult(pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"7")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            refused.append(error.value.code())

    done = await attempt(tmp_path, ask)
    assert refused == [grpc.StatusCode.FAILED_PRECONDITION] * 4
    assert (done.record.answer, len(done.record.turns)) == ("42", 1)


async def test_a_sandbox_that_somebody_removes_among_its_files_ends_its_rollout(tmp_path: Path) -> None:
    """A scorer would take the files that are missing for files not written."""

    async def vanish(stub: Any, launcher: FakeLauncher) -> None:
        [sandbox] = launcher.live.values()

        async def broken() -> AsyncIterator[pb.SendOutputRequest]:
            yield pb.SendOutputRequest(content=WHOLE + b"F\0\1y")
            sandbox.lose()
            await asyncio.Event().wait()

        await stub.SendOutput(broken())

    done = await attempt(tmp_path, vanish)
    assert done.outcome == Failed(FailedName.SANDBOX_LOST, "the container was removed by somebody else")


async def test_a_sandbox_that_ends_by_itself_among_its_files_keeps_its_result(tmp_path: Path) -> None:
    async def end(stub: Any, launcher: FakeLauncher) -> None:
        call = stub.SendOutput()
        await call.write(pb.SendOutputRequest(content=WHOLE + b"F\0\1y"))

    done = await attempt(tmp_path, end)
    assert (done.outcome, done.record.answer) == (Ended(EndedName.FINISHED), "42")
    assert done.record.output is None or not done.record.output.complete


@pytest.mark.parametrize("whole", [True, False])
async def test_a_standstill_among_files_ends_a_rollout_that_lacks_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    stood = asyncio.Event()

    async def standstill(longest_s: float = 20.0) -> float:
        await stood.wait()
        return 70.0

    monkeypatch.setattr(rollout, "standstill", standstill)

    async def send(stub: Any, launcher: FakeLauncher) -> None:
        async def pieces() -> AsyncIterator[pb.SendOutputRequest]:
            yield pb.SendOutputRequest(content=WHOLE)
            if whole:
                yield pb.SendOutputRequest(content=END)
            else:
                stood.set()
                await asyncio.Event().wait()

        await stub.SendOutput(pieces())
        stood.set()

    done = await attempt(tmp_path, send)
    lost = Failed(FailedName.SANDBOX_LOST, "the orchestrator itself stood still for 70 s")
    assert done.outcome == (Ended(EndedName.FINISHED) if whole else lost)


@pytest.mark.parametrize(("number", "ended"), [(errno.ENOSPC, False), (errno.EINVAL, True)])
async def test_a_full_disk_is_no_policy_s_doing_and_a_name_that_it_does_not_take_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ended: bool
) -> None:
    def fail(receiver: OutputReceiver, content: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(OutputReceiver, "feed", fail)

    async def send(stub: Any, launcher: FakeLauncher) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.SendOutput(stream(WHOLE, END))

    done = await attempt(tmp_path, send)
    if ended:
        assert (done.outcome, done.record.answer) == (Ended(EndedName.FINISHED), "42")
    else:
        assert done.outcome.name is FailedName.LAUNCH_ERROR


async def test_files_without_end_delay_the_end_of_a_rollout_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "OUTPUT_LIMIT_S", 0.1)

    async def stall(stub: Any, launcher: FakeLauncher) -> None:
        async def endless() -> AsyncIterator[pb.SendOutputRequest]:
            yield pb.SendOutputRequest(content=WHOLE)
            await asyncio.Event().wait()

        await stub.SendOutput(endless())

    done = await attempt(tmp_path, stall)
    assert (done.outcome, done.record.answer) == (Ended(EndedName.FINISHED), "42")
    assert done.record.output is None or not done.record.output.complete
