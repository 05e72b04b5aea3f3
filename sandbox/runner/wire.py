"""Translates between protobuf messages and the sandbox's types."""

import json
from typing import Any

from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.errors import RequestRefused
from sandbox.texts import clip
from sandbox.types import (
    AgentKind,
    AgentSettings,
    Assignment,
    Call,
    Completion,
    Kind,
    Message,
    NextStep,
    Notes,
    Place,
    Request,
    Result,
    Role,
    SandboxTool,
    StepReport,
    StepSetup,
    StopReason,
    TokenLogprob,
    ToolChoice,
    ToolSpec,
)

CONTRACT = 11
MAX_STEP_TEXT_BYTES = 64 * 1024
MAX_DETAIL_BYTES = 4 * 1024
MAX_REFUSAL_BYTES = 1024
MAX_CONVERSATION_BYTES = 4 << 20

_ROLES: dict[Role, pb.Role] = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
_TOOL_CHOICES: dict[ToolChoice, pb.ToolChoice] = {
    "auto": pb.TOOL_CHOICE_UNSPECIFIED,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}
_KINDS: dict[Kind, pb.CompletionKind] = {
    "action": pb.COMPLETION_KIND_ACTION,
    "plan": pb.COMPLETION_KIND_PLAN,
    "final": pb.COMPLETION_KIND_FINAL,
}
_AGENT_KINDS: dict[int, AgentKind] = {
    pb.AGENT_KIND_CODE: "code",
    pb.AGENT_KIND_TOOL_CALLING: "tool_calling",
    pb.AGENT_KIND_PROGRAM: "program",
    pb.AGENT_KIND_SHELL: "shell",
}
_STOP_REASONS: dict[StopReason, pb.StopReason] = {
    "final_answer": pb.STOP_REASON_FINAL_ANSWER,
    "max_steps": pb.STOP_REASON_MAX_STEPS,
    "no_answer": pb.STOP_REASON_NO_ANSWER,
    "out_of_memory": pb.STOP_REASON_OUT_OF_MEMORY,
    "crashed": pb.STOP_REASON_CRASHED,
    "bad_task": pb.STOP_REASON_BAD_TASK,
}


def assignment(message: pb.Assignment) -> Assignment:
    """Raises ValueError where JSON is malformed or of another shape, and for an unknown kind of agent."""
    agent = message.agent
    return Assignment(
        question=message.question,
        attachments=tuple(message.attachments),
        agent=AgentSettings(
            max_steps=agent.max_steps,
            step_timeout_s=agent.step_timeout.ToTimedelta().total_seconds(),
            planning_interval=agent.planning_interval or None,
            code_tags=(agent.code_tag_open, agent.code_tag_close),
            final_answer_at_max_steps=agent.final_answer_at_max_steps,
            authorized_imports=tuple(agent.authorized_imports),
            instructions=agent.instructions if agent.HasField("instructions") else None,
            verbosity=agent.verbosity,
            max_output_chars=agent.max_output_chars,
            kind=agent_kind(agent.kind),
            prompt_templates=_object(agent.prompt_templates_json, "prompt templates")
            if agent.HasField("prompt_templates_json")
            else None,
            managed_agents=tuple(_of_known_kind(member) for member in agent.managed_agents),
            calls_as_data=agent.calls_as_data,
            max_parallel_completions=max(1, agent.max_parallel_completions),
            max_token_length=agent.max_token_length,
        ),
        host_tools=tuple(_tool(tool) for tool in message.host_tools),
        sandbox_tools=tuple(SandboxTool(_tool(t.tool), t.module, t.source) for t in message.sandbox_tools),
        program=tuple(message.program),
        place=Place(message.working_directory, dict(message.environment)),
        healthcheck=message.healthcheck if message.HasField("healthcheck") else None,
        output=message.output if message.HasField("output") else None,
        context=tuple(map(_said, message.context)),
        steps=max(1, message.steps),
        setup=_setup(message.setup),
        listeners=tuple(message.listeners),
        authorities=message.authorities,
    )


def _said(message: pb.Message) -> Message:
    roles = {number: role for role, number in _ROLES.items()}
    calls = tuple(Call(call.id, call.name, call.arguments_json) for call in message.calls)
    return Message(roles[message.role], message.content, calls, message.call_id)


def _setup(message: pb.StepSetup) -> StepSetup:
    return StepSetup(
        tuple(message.files),
        message.command if message.HasField("command") else None,
        message.healthcheck if message.HasField("healthcheck") else None,
    )


def next_step(message: pb.SubmitResultResponse) -> NextStep | None:
    """None: the episode has ended."""
    return NextStep(message.next.question, _setup(message.next.setup)) if message.HasField("next") else None


def complete_request(sequence: int, kind: Kind, request: Request, agent: str = "") -> pb.CompleteRequest:
    """Lone surrogates cannot be sent as UTF-8: they become `?`."""
    return pb.CompleteRequest(
        sequence=sequence,
        kind=_KINDS[kind],
        messages=[_message(message) for message in request.messages],
        agent=agent,
        stop=request.stop,
        tools_json=json.dumps(request.tools) if request.tools else "",
        tool_choice=_TOOL_CHOICES[request.tool_choice],
        tool_name=request.tool_name,
        response_format_json=json.dumps(request.response_format) if request.response_format else "",
        logprobs=request.logprobs,
        count_only=request.count_only,
        notes=_notes(request.notes),
    )


def _notes(notes: Notes) -> pb.Notes | None:
    if notes == Notes():
        return None
    return pb.Notes(
        unused_fields=[_sendable(name) for name in notes.unused_fields],
        refusals=[clip(text, MAX_REFUSAL_BYTES) for text in notes.refusals],
    )


def _message(message: Message) -> pb.Message:
    return pb.Message(
        role=_ROLES[message.role],
        content=_sendable(message.content),
        calls=[
            pb.Call(id=_sendable(c.id), name=_sendable(c.name), arguments_json=_sendable(c.arguments))
            for c in message.calls
        ],
        call_id=_sendable(message.call_id),
        name=message.name,
    )


def _sendable(text: str) -> str:
    return clip(text, MAX_CONVERSATION_BYTES)


def completion(message: pb.Completion) -> Completion:
    length = message.finish_reason == pb.FINISH_REASON_LENGTH
    return Completion(
        text=message.text,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        finish_reason="length" if length else "stop",
        calls=tuple(Call(call.id, call.name, call.arguments_json) for call in message.calls),
        logprobs=tuple(TokenLogprob(one.token, one.logprob) for one in message.logprobs),
        stop=message.stop,
    )


def refused(message: pb.RequestRefused) -> RequestRefused:
    too_long = message.reason == pb.REFUSED_REASON_CONTEXT_LENGTH
    return RequestRefused(message.message, message.param, too_long=too_long)


def step_request(step: StepReport) -> pb.RecordStepRequest:
    """Texts are cut to what the orchestrator takes."""
    return pb.RecordStepRequest(
        step_number=step.step_number,
        model_output=clip(step.model_output, MAX_STEP_TEXT_BYTES),
        code=clip(step.code, MAX_STEP_TEXT_BYTES),
        observations=clip(step.observations, MAX_STEP_TEXT_BYTES),
        error_type=step.error_type,
        error=clip(step.error, MAX_STEP_TEXT_BYTES),
        is_final_answer=step.is_final_answer,
        duration=_duration(step.duration_s),
        agent=step.agent,
    )


def result_request(result: Result, duration_s: float, step: int = 1) -> pb.SubmitResultRequest:
    return pb.SubmitResultRequest(
        stop_reason=_STOP_REASONS[result.stop_reason],
        answer=result.answer,
        episode_duration=_duration(duration_s),
        detail=clip(result.detail, MAX_DETAIL_BYTES),
        notes=_notes(result.notes),
        step=step,
    )


def _tool(message: pb.HostTool) -> ToolSpec:
    inputs = _object(message.inputs_json, f"the inputs of tool {message.name!r}")
    if not all(isinstance(shape, dict) for shape in inputs.values()):
        raise ValueError(f"the inputs of tool {message.name!r} must be a JSON object of objects")
    return ToolSpec(message.name, message.description, inputs, message.output_type)


def _object(text: str, what: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    return value


def _of_known_kind(member: pb.ManagedAgent) -> pb.ManagedAgent:
    agent_kind(member.kind)
    return member


def agent_kind(number: int) -> AgentKind:
    """Raises ValueError."""
    if number not in _AGENT_KINDS:
        raise ValueError(f"{number} is not a kind of agent")
    return _AGENT_KINDS[number]


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
