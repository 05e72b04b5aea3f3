"""Converts between protobuf messages and our types, in pairs of functions. Invalid input is refused here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import orjson
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.agents.equipment import Equipment, SandboxTool
from orchestrator.calls.parsed import MAX_DEPTH, is_deeper
from orchestrator.errors import ProtocolError
from orchestrator.proxy.instructions import duration, healthcheck, needs_setup, said, setup
from orchestrator.proxy.left_files import OutputRule
from orchestrator.proxy.protobuf import TooMany, read
from orchestrator.proxy.requests import AgentRequest, CallMessage, Refusal, Reply, ToolReply
from orchestrator.rules.outcome import Submission
from orchestrator.rules.text import holds_more, valid
from orchestrator.tools.base import FILE_TOOLS, HostTool
from orchestrator.types import (
    NO_WORLD,
    AgentKind,
    AgentSpec,
    Call,
    CompletionKind,
    Confinement,
    Message,
    Mount,
    RequestNotes,
    Role,
    Step,
    Task,
    Tools,
    Wishes,
    World,
)

CONTRACT = 11
MAX_OUTPUT_PIECE_BYTES = 256 * 1024
CHUNK_BYTES = 256 * 1024
MAX_MESSAGES = 2_000
MAX_ARGUMENT_BYTES = 256 * 1024
MAX_TEXT_CHARS = 64 * 1024  # of one step's texts, for display
MAX_DETAIL_CHARS = 4 * 1024
MAX_UNUSED_FIELDS, MAX_FIELD_CHARS = 64, 80
MAX_REFUSALS, MAX_REFUSAL_CHARS = 3, 1024
_FIELDS = 256  # of any request but Park and Complete, those of inner messages included
_PARK_BYTES, _PARK_FIELDS = 256 * 1024, 4096  # every mount has eight
_STEP_BYTES = 2 << 20  # of one step: four texts with up to four bytes per character; cut here
_STEPS_BYTES = 64 * 1024  # of the steps that travel with another request
MAX_REQUEST_BYTES = (4 << 20) + _STEPS_BYTES  # a conversation of 4 MiB, and steps with it
_RESULT_BYTES = 512 * 1024
MAX_FRAMES, MAX_FRAME_BYTES = 128, 256 << 10  # of a message of Relay; of the data in one frame
MAX_RELAY_BYTES = 768 << 10  # of one message
MAX_STOPS = 4  # as OpenAI takes them
MAX_STOP_CHARS = 64

MAX_CALLS = 2_000  # of all messages of a request
MAX_TOOLS, MAX_TOOLS_BYTES, MAX_FORMAT_BYTES = 128, 256 * 1024, 64 * 1024
MAX_OBJECTS = 10_000  # and arrays, in the tools, the format and the calls of one request
# From here on it takes milliseconds to read a request and to print it as a prompt.
_LONG_BYTES, _LONG_FIELDS, _LONG_OBJECTS = 48 * 1024, 400, 500

_ROLES: dict[int, Role] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_TOOL_CHOICES: dict[int, Literal["auto", "none", "required"]] = {
    pb.TOOL_CHOICE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_NONE: "none",
    pb.TOOL_CHOICE_REQUIRED: "required",
}
_KINDS = {
    pb.COMPLETION_KIND_ACTION: CompletionKind.ACTION,
    pb.COMPLETION_KIND_PLAN: CompletionKind.PLAN,
    pb.COMPLETION_KIND_FINAL: CompletionKind.FINAL,
}
_AGENT_KINDS: dict[AgentKind, pb.AgentKind] = {
    "code": pb.AGENT_KIND_CODE,
    "tool_calling": pb.AGENT_KIND_TOOL_CALLING,
    "program": pb.AGENT_KIND_PROGRAM,
    "shell": pb.AGENT_KIND_SHELL,
}
_OF_A_MOUNT = [field.name for field in fields(Mount)]
_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def confinement(data: bytes) -> Confinement:
    """The sandbox's report of its own limits. Raises ProtocolError for another contract."""
    try:
        request = read(pb.ParkRequest, data, max_bytes=_PARK_BYTES, max_fields=_PARK_FIELDS)
    except ProtocolError as error:
        raise ProtocolError(
            f"the sandbox image speaks another contract ({error}); rebuild it with `orchestrator image build`"
        ) from error
    if request.contract != CONTRACT:
        raise ProtocolError(
            f"the sandbox image speaks contract {request.contract}, this orchestrator {CONTRACT}; "
            "rebuild it with `orchestrator image build`"
        )
    report = request.confinement
    return Confinement(
        capability_bounding_set=report.capability_bounding_set,
        no_new_privileges=report.no_new_privileges,
        seccomp_mode=report.seccomp_mode,
        network_interfaces=tuple(report.network_interfaces),
        root_read_only=report.root_read_only,
        runner_uid=report.runner_uid,
        worker_uid=report.worker_uid,
        process_id=report.process_id,
        own_control_groups=report.own_control_groups,
        mounts=tuple(Mount(**{name: getattr(m, name) for name in _OF_A_MOUNT}) for m in report.mounts),
        limits={limit.name: limit.value for limit in report.limits},
        devices=tuple(report.devices),
        exposed_paths=tuple(report.exposed_paths),
    )


def assignment(
    task: Task,
    agent: AgentSpec,
    tools: Mapping[str, HostTool],
    equipment: Equipment,
    output: OutputRule | None = None,
    *,
    max_token_length: int = 0,
    parallel: int = 1,
    world: World = NO_WORLD,
) -> pb.Assignment:
    """What the sandbox is told: the question, the files' names, where and how to work. Never the answer."""
    templates = equipment.prompt_templates
    everything = (*FILE_TOOLS, *(tool.name for tool in equipment.sandbox_tools), *tools)
    return pb.Assignment(
        question=task.question,
        attachments=[pb.AttachmentFile(name=a.name, size_bytes=a.size_bytes) for a in task.attachments],
        agent=pb.AgentSettings(
            max_steps=agent.max_steps,
            step_timeout=duration(agent.step_timeout_s),
            planning_interval=agent.planning_interval or 0,
            code_tag_open=agent.code_tags[0],
            code_tag_close=agent.code_tags[1],
            final_answer_at_max_steps=agent.final_answer_at_max_steps,
            authorized_imports=agent.authorized_imports,
            instructions=agent.instructions,
            verbosity=agent.verbosity,
            max_output_chars=agent.max_output_chars,
            kind=_AGENT_KINDS[agent.kind],
            prompt_templates_json=None if templates is None else json.dumps(templates),
            managed_agents=[
                pb.ManagedAgent(
                    name=managed.name,
                    description=managed.description,
                    tools=everything if managed.tools is None else managed.tools,
                    max_steps=managed.max_steps or agent.max_steps,
                    kind=_AGENT_KINDS[managed.kind or agent.kind],
                )
                for managed in agent.managed_agents
            ],
            calls_as_data=agent.call_format is not None,
            max_token_length=max_token_length,
            max_parallel_completions=parallel,
        ),
        host_tools=[_tool(name, tool) for name, tool in tools.items()],
        sandbox_tools=[
            pb.SandboxTool(tool=_tool(tool.name, tool), module=tool.module, source=tool.source)
            for tool in equipment.sandbox_tools
        ],
        program=[pb.ProgramFile(path=file.path, content=file.content) for file in equipment.program],
        working_directory=task.cwd or "",
        environment=task.environment,
        healthcheck=None if task.healthcheck is None else healthcheck(task.healthcheck),
        context=[said(message) for message in task.context],
        steps=len(task.steps),
        setup=setup(task.steps[0]) if task.steps and needs_setup(task.steps[0]) else None,
        listeners=[
            pb.Listener(address=one.address, port=one.port, is_proxy=one.is_proxy)
            for one in (way.listener for way in world.ways)
        ],
        authorities=world.authorities,
        output=None if output is None else pb.OutputLimits(max_files=output.max_files, max_bytes=output.max_bytes),
    )


def _tool(name: str, tool: HostTool | SandboxTool) -> pb.HostTool:
    return pb.HostTool(
        name=name,
        description=tool.description,
        inputs_json=json.dumps({name: dict(shape) for name, shape in tool.inputs.items()}),
        output_type=tool.output_type,
    )


def completion_request(data: bytes) -> AgentRequest:
    """The request, however long: it may take milliseconds to read. Raises ProtocolError."""
    fields = 3 + MAX_STOPS + 4 * MAX_MESSAGES + 4 * MAX_CALLS + _FIELDS
    request = read(pb.CompleteRequest, data, max_bytes=MAX_REQUEST_BYTES, max_fields=fields)
    calls = _calls(request)
    return _asked(request, calls, _refusal(request, _json_texts(request, calls)), is_long=True)


def short_request(data: bytes) -> AgentRequest | None:
    """The request; None: it is a long one. Raises ProtocolError."""
    if len(data) > _LONG_BYTES:
        return None
    try:
        request = read(pb.CompleteRequest, data, max_bytes=_LONG_BYTES, max_fields=_LONG_FIELDS)
    except TooMany:
        return None
    calls = _calls(request)
    return None if holds_more(_json_texts(request, calls), _LONG_OBJECTS) else _asked(request, calls)


def _asked(
    request: pb.CompleteRequest, calls: list[pb.Call], refusal: Refusal | None = None, *, is_long: bool = False
) -> AgentRequest:
    kind = _KINDS.get(request.kind)
    if kind is None:
        raise ProtocolError(f"unknown completion kind {request.kind}")
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        raise ProtocolError(f"{len(request.messages)} messages; 1 to {MAX_MESSAGES} are accepted")
    if len(request.stop) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in request.stop):
        raise ProtocolError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters are accepted")
    if len(calls) > MAX_CALLS:
        raise ProtocolError(f"more than {MAX_CALLS} calls of tools in one conversation")
    return AgentRequest(
        sequence=request.sequence,
        kind=kind,
        messages=tuple(map(_message, request.messages)) if refusal is None else (),
        stop=tuple(request.stop),
        agent=request.agent,
        steps=tuple(map(_step, request.steps)),
        count_only=request.count_only,
        notes=_notes(request.notes),
        refusal=refusal,
        wishes=_wishes(request) if refusal is None else Wishes(),
        is_long=is_long,
    )


def _calls(request: pb.CompleteRequest) -> list[pb.Call]:
    """The calls of all messages."""
    return [call for message in request.messages for call in message.calls]


def _json_texts(request: pb.CompleteRequest, calls: list[pb.Call]) -> bytes:
    """All JSON in a request, one text behind the other."""
    arguments = (call.arguments_json for call in calls)
    return "\n".join((request.tools_json, request.response_format_json, *arguments)).encode()


def _refusal(request: pb.CompleteRequest, json_texts: bytes) -> Refusal | None:
    """Why a program's request is too large to be read; None: it is not."""
    for name, text, most in (
        ("tools", request.tools_json, MAX_TOOLS_BYTES),
        ("response_format", request.response_format_json, MAX_FORMAT_BYTES),
    ):
        if len(text) > most or len(text.encode()) > most:
            return Refusal(f"{name} of more than {most} bytes: send less of it", name)
    if holds_more(json_texts, MAX_OBJECTS):
        # Only where the tools are too many by themselves: a conversation is what the policy made of it.
        where = "tools" if holds_more(request.tools_json.encode(), MAX_OBJECTS) else "messages"
        text = f"more than {MAX_OBJECTS} objects and arrays in tools, response_format and calls: send fewer"
        return Refusal(text, where)
    return None


def _notes(notes: pb.Notes) -> RequestNotes:
    """Cut to what is shown."""
    return RequestNotes(
        tuple(name[:MAX_FIELD_CHARS] for name in notes.unused_fields[:MAX_UNUSED_FIELDS]),
        tuple(text[:MAX_REFUSAL_CHARS] for text in notes.refusals[:MAX_REFUSALS]),
    )


def _message(message: pb.Message) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise ProtocolError(f"unknown role {message.role}")
    if role != "tool" and not message.calls:
        try:
            return Message(role, message.content, name=message.name)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
    if message.calls and role != "assistant":
        raise ProtocolError("calls of tools in a message that is not the assistant's")
    calls = tuple(Call(call.id, call.name, _object(call.arguments_json)) for call in message.calls)
    return CallMessage(role, message.content, calls, message.call_id)


def _object(text: str) -> str:
    """The text of a JSON object, which may not hold what no record can. Raises ProtocolError."""
    value = _json(text, "arguments of a call")
    if not isinstance(value, dict):
        raise ProtocolError("the arguments of a call must be a JSON object")
    return text


def _wishes(request: pb.CompleteRequest) -> Wishes:
    choice = _TOOL_CHOICES.get(request.tool_choice)
    if choice is None:
        raise ProtocolError(f"unknown tool choice {request.tool_choice}")
    tools = _tools(_json(request.tools_json, "tools")) if request.tools_json else ()
    response_format = (
        _json(request.response_format_json, "response format") if request.response_format_json else {}
    )
    if not isinstance(response_format, dict) or not _is_format(response_format):
        raise ProtocolError("the response format is not one of OpenAI's")
    if request.tool_name and request.tool_name not in {tool["function"]["name"] for tool in tools}:
        raise ProtocolError("the demanded tool is not among the tools")
    return Wishes(tools, choice, request.tool_name, response_format, request.logprobs)


def _is_format(form: Mapping[str, Any]) -> bool:
    schema = form.get("json_schema")
    if form.get("type", "text") != "json_schema":
        return form.get("type", "text") in ("text", "json_object") and schema is None
    return isinstance(schema, dict) and isinstance(schema.get("schema"), dict)


def _tools(value: Any) -> Tools:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ProtocolError(f"tools must be a list of at most {MAX_TOOLS}")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ProtocolError("each tool must be a function with a name")
    return tuple(value)


def _json(text: str, what: str) -> Any:
    try:
        value = orjson.loads(text)  # strict: no NaN, no lone surrogates, bounded depth
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"{what}: not JSON") from error
    if is_deeper(value, MAX_DEPTH):  # orjson reads deeper values than it writes
        raise ProtocolError(f"{what}: nested more than {MAX_DEPTH} deep")
    return value


def completion_response(reply: Reply) -> pb.CompleteResponse:
    """The answer to a `completion_request`."""
    if reply.ended is not None:
        return pb.CompleteResponse(ended=pb.EpisodeEnded(outcome=reply.ended))
    if reply.refused is not None:
        too_long = reply.refused.too_long
        return pb.CompleteResponse(
            refused=pb.RequestRefused(
                reason=pb.REFUSED_REASON_CONTEXT_LENGTH if too_long else pb.REFUSED_REASON_UNSUPPORTED,
                message=valid(reply.refused.text),
                param=reply.refused.param,
            )
        )
    if reply.counted is not None:
        counted = pb.Completion(prompt_tokens=reply.counted, finish_reason=pb.FINISH_REASON_STOP)
        return pb.CompleteResponse(completion=counted)
    completion, parsed = reply.completion, reply.parsed
    assert completion is not None
    return pb.CompleteResponse(
        completion=pb.Completion(
            text=valid(completion.visible if parsed is None else parsed.content),
            calls=[
                pb.Call(id=call.id, name=call.name, arguments_json=valid(call.arguments))
                for call in (parsed.calls if parsed else ())
            ],
            logprobs=[pb.TokenLogprob(token=valid(token), logprob=value) for token, value in reply.logprobs],
            finish_reason=_FINISH[completion.finish_reason],
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            stop=reply.stop,
        )
    )


def abandoned(data: bytes) -> int:
    """The number of a completion that nobody waits for. Raises ProtocolError."""
    return read(pb.AbandonCompletionRequest, data, max_bytes=16, max_fields=1).sequence


def tool_request(data: bytes) -> tuple[int, str, dict[str, Any]]:
    """Sequence number, name and arguments. Raises ProtocolError."""
    request = read(pb.CallToolRequest, data, max_bytes=2 * MAX_ARGUMENT_BYTES, max_fields=_FIELDS)
    if len(request.arguments_json.encode()) > MAX_ARGUMENT_BYTES:
        raise ProtocolError(f"tool arguments over {MAX_ARGUMENT_BYTES} bytes")
    try:
        arguments = json.loads(request.arguments_json or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("tool arguments are not JSON") from error
    if not isinstance(arguments, dict):
        raise ProtocolError("tool arguments must be a JSON object")
    return request.sequence, request.name[:200], arguments


def tool_response(reply: ToolReply) -> pb.CallToolResponse:
    """The answer to a `tool_request`."""
    if reply.ended is not None:
        return pb.CallToolResponse(ended=pb.EpisodeEnded(outcome=reply.ended))
    if reply.error is not None:
        return pb.CallToolResponse(error=valid(reply.error))
    return pb.CallToolResponse(output=valid(reply.output or ""))


def step(data: bytes) -> Step:
    """A step as the sandbox reports it, with texts cut for display. Raises ProtocolError."""
    return _step(read(pb.RecordStepRequest, data, max_bytes=_STEP_BYTES, max_fields=_FIELDS))


def _step(request: pb.RecordStepRequest) -> Step:
    return Step(
        step_number=request.step_number,
        model_output=request.model_output[:MAX_TEXT_CHARS],
        code=request.code[:MAX_TEXT_CHARS],
        observations=request.observations[:MAX_TEXT_CHARS],
        error_type=request.error_type[:200],
        error=request.error[:MAX_TEXT_CHARS],
        is_final_answer=request.is_final_answer,
        duration_s=_seconds(request.duration),
        agent=request.agent[:200],
    )


def output_piece(data: bytes) -> bytes:
    """A piece of the stream of files. Raises ProtocolError."""
    return read(pb.SendOutputRequest, data, max_bytes=MAX_OUTPUT_PIECE_BYTES + 16, max_fields=2).content


def relayed(data: bytes) -> Sequence[pb.Frame]:
    """The frames of one message. Raises ProtocolError."""
    frames = read(pb.RelayRequest, data, max_bytes=MAX_RELAY_BYTES, max_fields=3 * MAX_FRAMES).frames
    if any(len(frame.data) > MAX_FRAME_BYTES for frame in frames):
        raise ProtocolError(f"a frame with more than {MAX_FRAME_BYTES} bytes of data")
    return frames


def submission(data: bytes) -> Submission:
    """The submitted result. Raises ProtocolError."""
    request = read(pb.SubmitResultRequest, data, max_bytes=_RESULT_BYTES + _STEPS_BYTES, max_fields=_FIELDS)
    if request.stop_reason not in pb.StopReason.values() or not request.stop_reason:
        raise ProtocolError(f"unknown stop reason {request.stop_reason}")
    return Submission(
        reason=pb.StopReason.Name(request.stop_reason).removeprefix("STOP_REASON_").lower(),
        answer=request.answer if request.HasField("answer") else None,
        detail=request.detail[:MAX_DETAIL_CHARS],
        steps=tuple(map(_step, request.steps)),
        requests=_notes(request.notes),
        step=max(1, request.step),
    )


def _seconds(duration: Duration) -> float:
    return max(0.0, min(duration.seconds + duration.nanos / 1e9, 1e6))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
