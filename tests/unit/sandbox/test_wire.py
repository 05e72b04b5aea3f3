"""The wire in both directions, from the sandbox's side."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.proxy import wire as orchestrators_wire
from orchestrator.types import Mount
from sandbox.pid1 import confinement as pid_1
from sandbox.runner import wire
from sandbox.runner.runner import prompt
from sandbox.types import (
    AgentSettings,
    Assignment,
    Identities,
    Kind,
    Message,
    Request,
    Result,
    StepReport,
    StopReason,
    ToolSpec,
)


def test_an_assignment_arrives_whole() -> None:
    sent = pb.Assignment(
        question="Why?",
        attachments=[pb.AttachmentFile(name="a.txt", size_bytes=5)],
        agent=pb.AgentSettings(
            max_steps=3,
            step_timeout=Duration(seconds=1, nanos=500_000_000),
            code_tag_open="<code>",
            code_tag_close="</code>",
            authorized_imports=["*"],
            instructions="Be brief.",
            max_output_chars=100,
            kind=pb.AGENT_KIND_CODE,
        ),
        host_tools=[
            pb.HostTool(
                name="t",
                description="d",
                inputs_json='{"q": {"type": "string", "description": "x"}}',
                output_type="string",
            )
        ],
    )
    settings = AgentSettings(max_steps=3, step_timeout_s=1.5, instructions="Be brief.", max_output_chars=100)
    tool = ToolSpec("t", "d", {"q": {"type": "string", "description": "x"}}, "string")
    assert wire.assignment(sent) == Assignment("Why?", settings, (tool,), tuple(sent.attachments))


def test_what_is_absent_stays_absent() -> None:
    settings = wire.assignment(pb.Assignment(agent=pb.AgentSettings(max_steps=1, kind=pb.AGENT_KIND_CODE))).agent
    assert settings.instructions is None
    assert settings.planning_interval is None


@pytest.mark.parametrize("inputs", ["", "[]", "3", '{"q": 1}', "{"])
def test_tool_inputs_that_are_no_object_are_refused(inputs: str) -> None:
    with pytest.raises(ValueError):
        wire.assignment(pb.Assignment(host_tools=[pb.HostTool(name="t", inputs_json=inputs)]))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_completion_can_be_asked_for(kind: Kind) -> None:
    request = wire.complete_request(4, kind, Request((Message("user", "lone \ud800 surrogate"),)))
    assert pb.CompletionKind.Name(request.kind) == f"COMPLETION_KIND_{kind.upper()}"
    assert request.messages[0].content == "lone ? surrogate"


@pytest.mark.parametrize("reason", get_args(StopReason))
def test_every_end_can_be_submitted(reason: StopReason) -> None:
    request = wire.result_request(Result(reason, detail="x" * 10_000), 1.25)
    assert pb.StopReason.Name(request.stop_reason) == f"STOP_REASON_{reason.upper()}"
    assert not request.HasField("answer")
    assert len(request.detail) == wire.MAX_DETAIL_BYTES
    assert request.episode_duration == Duration(seconds=1, nanos=250_000_000)


def test_an_empty_answer_is_still_an_answer() -> None:
    assert wire.result_request(Result("final_answer", b""), 0.0).HasField("answer")


def test_the_texts_of_a_step_are_cut() -> None:
    long = "é" * 100_000
    request = wire.step_request(StepReport(1, long, long, long, "", long, False, 0.5))
    for text in (request.model_output, request.code, request.observations, request.error):
        assert len(text.encode()) == wire.MAX_STEP_TEXT_BYTES


@pytest.mark.parametrize(("identities", "uids"), [(None, (0, 0)), (Identities(5, 6, 7), (5, 6))])
def test_pid_1_reports_its_limits_as_the_orchestrator_reads_them(
    monkeypatch: pytest.MonkeyPatch, identities: Identities | None, uids: tuple[int, int]
) -> None:
    line = "36 35 0:31 / /tmp rw,nosuid,nodev,noexec - tmpfs tmpfs rw,size=4k,nr_inodes=16"
    lines = pid_1._lines
    monkeypatch.setattr(pid_1, "_lines", lambda path: [line] * 300 if "mountinfo" in str(path) else lines(path))
    monkeypatch.setattr(pid_1, "_capacity", lambda target: (4096, 16))
    monkeypatch.setattr(pid_1, "_limits", lambda: {"pids": 9})
    request = pb.ParkRequest(contract=wire.CONTRACT, confinement=pid_1.confinement(identities))
    seen = orchestrators_wire.confinement(request.SerializeToString())
    assert len(seen.mounts) == pid_1.MAX_MOUNTS
    assert seen.mounts[0] == Mount("/tmp", "tmpfs", False, True, True, True, 4096, 16)
    assert seen.limits == {"pids": 9}
    assert wire.CONTRACT == orchestrators_wire.CONTRACT
    assert (seen.runner_uid, seen.worker_uid) == uids


def test_the_prompt_is_the_question_and_the_paths() -> None:
    assert prompt("Why?", ()) == "Why?"
    assert prompt("Why?", (Path("/attachments/a b.txt"),)).splitlines()[-1] == "- /attachments/a b.txt"
