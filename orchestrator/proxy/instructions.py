"""What a sandbox is told to do, before and behind the settings of its agent: an earlier conversation, the steps of
a task, what sets them up."""

import math

from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.types import ContextMessage, Healthcheck, Role, TaskStep

_ROLES: dict[Role, pb.Role] = {
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}


def said(message: ContextMessage) -> pb.Message:
    calls = [pb.Call(id=call.id, name=call.name, arguments_json=call.arguments) for call in message.calls]
    return pb.Message(role=_ROLES[message.role], content=message.content, calls=calls, call_id=message.call_id)


def setup(step: TaskStep) -> pb.StepSetup:
    return pb.StepSetup(
        files=[pb.ProgramFile(path=f.path, content=f.content, executable=f.executable) for f in step.files],
        command=None if step.setup is None else healthcheck(step.setup),
        healthcheck=None if step.healthcheck is None else healthcheck(step.healthcheck),
    )


def needs_setup(step: TaskStep) -> bool:
    """Whether anything is done in the sandbox before it; the sandbox says when that is over."""
    return bool(step.files or step.setup or step.healthcheck)


def result_response(following: TaskStep | None) -> pb.SubmitResultResponse:
    """None: the episode has ended."""
    if following is None:
        return pb.SubmitResultResponse()
    before = setup(following) if needs_setup(following) else None
    return pb.SubmitResultResponse(next=pb.NextStep(question=following.question, setup=before))


def healthcheck(check: Healthcheck) -> pb.Healthcheck:
    return pb.Healthcheck(
        command=check.command,
        interval=duration(check.interval_s),
        timeout=duration(check.timeout_s),
        start_period=duration(check.start_period_s),
        start_interval=duration(check.start_interval_s),
        retries=check.retries,
        as_root=check.as_root,
    )


def duration(seconds: float) -> Duration:
    floor = math.floor(seconds)
    return Duration(seconds=floor, nanos=int((seconds - floor) * 1e9))
