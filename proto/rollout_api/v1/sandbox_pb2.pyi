from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_KIND_UNSPECIFIED: _ClassVar[AgentKind]
    AGENT_KIND_CODE: _ClassVar[AgentKind]
    AGENT_KIND_TOOL_CALLING: _ClassVar[AgentKind]
    AGENT_KIND_PROGRAM: _ClassVar[AgentKind]
    AGENT_KIND_SHELL: _ClassVar[AgentKind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class CompletionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPLETION_KIND_UNSPECIFIED: _ClassVar[CompletionKind]
    COMPLETION_KIND_ACTION: _ClassVar[CompletionKind]
    COMPLETION_KIND_PLAN: _ClassVar[CompletionKind]
    COMPLETION_KIND_FINAL: _ClassVar[CompletionKind]

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class RefusedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSED_REASON_UNSPECIFIED: _ClassVar[RefusedReason]
    REFUSED_REASON_UNSUPPORTED: _ClassVar[RefusedReason]
    REFUSED_REASON_CONTEXT_LENGTH: _ClassVar[RefusedReason]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_FINAL_ANSWER: _ClassVar[StopReason]
    STOP_REASON_MAX_STEPS: _ClassVar[StopReason]
    STOP_REASON_NO_ANSWER: _ClassVar[StopReason]
    STOP_REASON_OUT_OF_MEMORY: _ClassVar[StopReason]
    STOP_REASON_CRASHED: _ClassVar[StopReason]
    STOP_REASON_BAD_TASK: _ClassVar[StopReason]

class StreamEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_END_UNSPECIFIED: _ClassVar[StreamEnd]
    STREAM_END_DATA: _ClassVar[StreamEnd]
    STREAM_END_CLOSE: _ClassVar[StreamEnd]
    STREAM_END_RESET: _ClassVar[StreamEnd]
AGENT_KIND_UNSPECIFIED: AgentKind
AGENT_KIND_CODE: AgentKind
AGENT_KIND_TOOL_CALLING: AgentKind
AGENT_KIND_PROGRAM: AgentKind
AGENT_KIND_SHELL: AgentKind
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
COMPLETION_KIND_UNSPECIFIED: CompletionKind
COMPLETION_KIND_ACTION: CompletionKind
COMPLETION_KIND_PLAN: CompletionKind
COMPLETION_KIND_FINAL: CompletionKind
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
REFUSED_REASON_UNSPECIFIED: RefusedReason
REFUSED_REASON_UNSUPPORTED: RefusedReason
REFUSED_REASON_CONTEXT_LENGTH: RefusedReason
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_FINAL_ANSWER: StopReason
STOP_REASON_MAX_STEPS: StopReason
STOP_REASON_NO_ANSWER: StopReason
STOP_REASON_OUT_OF_MEMORY: StopReason
STOP_REASON_CRASHED: StopReason
STOP_REASON_BAD_TASK: StopReason
STREAM_END_UNSPECIFIED: StreamEnd
STREAM_END_DATA: StreamEnd
STREAM_END_CLOSE: StreamEnd
STREAM_END_RESET: StreamEnd

class ParkRequest(_message.Message):
    __slots__ = ("contract", "confinement")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CONFINEMENT_FIELD_NUMBER: _ClassVar[int]
    contract: int
    confinement: Confinement
    def __init__(self, contract: _Optional[int] = ..., confinement: _Optional[_Union[Confinement, _Mapping]] = ...) -> None: ...

class Confinement(_message.Message):
    __slots__ = ("capability_bounding_set", "no_new_privileges", "seccomp_mode", "network_interfaces", "root_read_only", "runner_uid", "worker_uid", "process_id", "own_control_groups", "mounts", "limits", "devices", "exposed_paths")
    CAPABILITY_BOUNDING_SET_FIELD_NUMBER: _ClassVar[int]
    NO_NEW_PRIVILEGES_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_MODE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_INTERFACES_FIELD_NUMBER: _ClassVar[int]
    ROOT_READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UID_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    OWN_CONTROL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_PATHS_FIELD_NUMBER: _ClassVar[int]
    capability_bounding_set: int
    no_new_privileges: bool
    seccomp_mode: int
    network_interfaces: _containers.RepeatedScalarFieldContainer[str]
    root_read_only: bool
    runner_uid: int
    worker_uid: int
    process_id: int
    own_control_groups: bool
    mounts: _containers.RepeatedCompositeFieldContainer[Mount]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    devices: _containers.RepeatedScalarFieldContainer[str]
    exposed_paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, capability_bounding_set: _Optional[int] = ..., no_new_privileges: bool = ..., seccomp_mode: _Optional[int] = ..., network_interfaces: _Optional[_Iterable[str]] = ..., root_read_only: bool = ..., runner_uid: _Optional[int] = ..., worker_uid: _Optional[int] = ..., process_id: _Optional[int] = ..., own_control_groups: bool = ..., mounts: _Optional[_Iterable[_Union[Mount, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ..., exposed_paths: _Optional[_Iterable[str]] = ...) -> None: ...

class Mount(_message.Message):
    __slots__ = ("target", "type", "read_only", "no_suid", "no_dev", "no_exec", "size_bytes", "inodes")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    NO_SUID_FIELD_NUMBER: _ClassVar[int]
    NO_DEV_FIELD_NUMBER: _ClassVar[int]
    NO_EXEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    target: str
    type: str
    read_only: bool
    no_suid: bool
    no_dev: bool
    no_exec: bool
    size_bytes: int
    inodes: int
    def __init__(self, target: _Optional[str] = ..., type: _Optional[str] = ..., read_only: bool = ..., no_suid: bool = ..., no_dev: bool = ..., no_exec: bool = ..., size_bytes: _Optional[int] = ..., inodes: _Optional[int] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class ParkResponse(_message.Message):
    __slots__ = ("assignment", "chunk", "start")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    chunk: AttachmentChunk
    start: Start
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., chunk: _Optional[_Union[AttachmentChunk, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("question", "attachments", "agent", "host_tools", "sandbox_tools", "program", "working_directory", "environment", "healthcheck", "context", "steps", "setup", "listeners", "authorities", "output")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    HOST_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_TOOLS_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    WORKING_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    HEALTHCHECK_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    question: str
    attachments: _containers.RepeatedCompositeFieldContainer[AttachmentFile]
    agent: AgentSettings
    host_tools: _containers.RepeatedCompositeFieldContainer[HostTool]
    sandbox_tools: _containers.RepeatedCompositeFieldContainer[SandboxTool]
    program: _containers.RepeatedCompositeFieldContainer[ProgramFile]
    working_directory: str
    environment: _containers.ScalarMap[str, str]
    healthcheck: Healthcheck
    context: _containers.RepeatedCompositeFieldContainer[Message]
    steps: int
    setup: StepSetup
    listeners: _containers.RepeatedCompositeFieldContainer[Listener]
    authorities: bytes
    output: OutputLimits
    def __init__(self, question: _Optional[str] = ..., attachments: _Optional[_Iterable[_Union[AttachmentFile, _Mapping]]] = ..., agent: _Optional[_Union[AgentSettings, _Mapping]] = ..., host_tools: _Optional[_Iterable[_Union[HostTool, _Mapping]]] = ..., sandbox_tools: _Optional[_Iterable[_Union[SandboxTool, _Mapping]]] = ..., program: _Optional[_Iterable[_Union[ProgramFile, _Mapping]]] = ..., working_directory: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., healthcheck: _Optional[_Union[Healthcheck, _Mapping]] = ..., context: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., steps: _Optional[int] = ..., setup: _Optional[_Union[StepSetup, _Mapping]] = ..., listeners: _Optional[_Iterable[_Union[Listener, _Mapping]]] = ..., authorities: _Optional[bytes] = ..., output: _Optional[_Union[OutputLimits, _Mapping]] = ...) -> None: ...

class Listener(_message.Message):
    __slots__ = ("address", "port", "is_proxy")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    IS_PROXY_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    is_proxy: bool
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ..., is_proxy: bool = ...) -> None: ...

class StepSetup(_message.Message):
    __slots__ = ("files", "command", "healthcheck")
    FILES_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    HEALTHCHECK_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ProgramFile]
    command: Healthcheck
    healthcheck: Healthcheck
    def __init__(self, files: _Optional[_Iterable[_Union[ProgramFile, _Mapping]]] = ..., command: _Optional[_Union[Healthcheck, _Mapping]] = ..., healthcheck: _Optional[_Union[Healthcheck, _Mapping]] = ...) -> None: ...

class NextStep(_message.Message):
    __slots__ = ("question", "setup")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    question: str
    setup: StepSetup
    def __init__(self, question: _Optional[str] = ..., setup: _Optional[_Union[StepSetup, _Mapping]] = ...) -> None: ...

class Healthcheck(_message.Message):
    __slots__ = ("command", "interval", "timeout", "start_period", "start_interval", "retries", "as_root")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    START_PERIOD_FIELD_NUMBER: _ClassVar[int]
    START_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    AS_ROOT_FIELD_NUMBER: _ClassVar[int]
    command: str
    interval: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    start_period: _duration_pb2.Duration
    start_interval: _duration_pb2.Duration
    retries: int
    as_root: bool
    def __init__(self, command: _Optional[str] = ..., interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., start_period: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., start_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., retries: _Optional[int] = ..., as_root: bool = ...) -> None: ...

class OutputLimits(_message.Message):
    __slots__ = ("max_files", "max_bytes")
    MAX_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_files: int
    max_bytes: int
    def __init__(self, max_files: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class AttachmentFile(_message.Message):
    __slots__ = ("name", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class AgentSettings(_message.Message):
    __slots__ = ("max_steps", "step_timeout", "planning_interval", "code_tag_open", "code_tag_close", "final_answer_at_max_steps", "authorized_imports", "instructions", "verbosity", "max_output_chars", "kind", "prompt_templates_json", "managed_agents", "calls_as_data", "max_parallel_completions", "max_token_length")
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PLANNING_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CODE_TAG_OPEN_FIELD_NUMBER: _ClassVar[int]
    CODE_TAG_CLOSE_FIELD_NUMBER: _ClassVar[int]
    FINAL_ANSWER_AT_MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    VERBOSITY_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_CHARS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEMPLATES_JSON_FIELD_NUMBER: _ClassVar[int]
    MANAGED_AGENTS_FIELD_NUMBER: _ClassVar[int]
    CALLS_AS_DATA_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    max_steps: int
    step_timeout: _duration_pb2.Duration
    planning_interval: int
    code_tag_open: str
    code_tag_close: str
    final_answer_at_max_steps: bool
    authorized_imports: _containers.RepeatedScalarFieldContainer[str]
    instructions: str
    verbosity: int
    max_output_chars: int
    kind: AgentKind
    prompt_templates_json: str
    managed_agents: _containers.RepeatedCompositeFieldContainer[ManagedAgent]
    calls_as_data: bool
    max_parallel_completions: int
    max_token_length: int
    def __init__(self, max_steps: _Optional[int] = ..., step_timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., planning_interval: _Optional[int] = ..., code_tag_open: _Optional[str] = ..., code_tag_close: _Optional[str] = ..., final_answer_at_max_steps: bool = ..., authorized_imports: _Optional[_Iterable[str]] = ..., instructions: _Optional[str] = ..., verbosity: _Optional[int] = ..., max_output_chars: _Optional[int] = ..., kind: _Optional[_Union[AgentKind, str]] = ..., prompt_templates_json: _Optional[str] = ..., managed_agents: _Optional[_Iterable[_Union[ManagedAgent, _Mapping]]] = ..., calls_as_data: bool = ..., max_parallel_completions: _Optional[int] = ..., max_token_length: _Optional[int] = ...) -> None: ...

class ManagedAgent(_message.Message):
    __slots__ = ("name", "description", "tools", "max_steps", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    tools: _containers.RepeatedScalarFieldContainer[str]
    max_steps: int
    kind: AgentKind
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., tools: _Optional[_Iterable[str]] = ..., max_steps: _Optional[int] = ..., kind: _Optional[_Union[AgentKind, str]] = ...) -> None: ...

class SandboxTool(_message.Message):
    __slots__ = ("tool", "module", "source")
    TOOL_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    tool: HostTool
    module: str
    source: str
    def __init__(self, tool: _Optional[_Union[HostTool, _Mapping]] = ..., module: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ProgramFile(_message.Message):
    __slots__ = ("path", "content", "executable")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    executable: bool
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ..., executable: bool = ...) -> None: ...

class HostTool(_message.Message):
    __slots__ = ("name", "description", "inputs_json", "output_type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    inputs_json: str
    output_type: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., inputs_json: _Optional[str] = ..., output_type: _Optional[str] = ...) -> None: ...

class AttachmentChunk(_message.Message):
    __slots__ = ("index", "content")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    content: bytes
    def __init__(self, index: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "calls", "call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: Role
    content: str
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    call_id: str
    name: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("sequence", "kind", "messages", "stop", "agent", "steps", "tools_json", "tool_choice", "tool_name", "response_format_json", "logprobs", "count_only", "notes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_JSON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: CompletionKind
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    stop: _containers.RepeatedScalarFieldContainer[str]
    agent: str
    steps: _containers.RepeatedCompositeFieldContainer[RecordStepRequest]
    tools_json: str
    tool_choice: ToolChoice
    tool_name: str
    response_format_json: str
    logprobs: bool
    count_only: bool
    notes: Notes
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[CompletionKind, str]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., stop: _Optional[_Iterable[str]] = ..., agent: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[RecordStepRequest, _Mapping]]] = ..., tools_json: _Optional[str] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., response_format_json: _Optional[str] = ..., logprobs: bool = ..., count_only: bool = ..., notes: _Optional[_Union[Notes, _Mapping]] = ...) -> None: ...

class Notes(_message.Message):
    __slots__ = ("unused_fields", "refusals")
    UNUSED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    unused_fields: _containers.RepeatedScalarFieldContainer[str]
    refusals: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unused_fields: _Optional[_Iterable[str]] = ..., refusals: _Optional[_Iterable[str]] = ...) -> None: ...

class AbandonCompletionRequest(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class AbandonCompletionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("completion", "ended", "refused")
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    completion: Completion
    ended: EpisodeEnded
    refused: RequestRefused
    def __init__(self, completion: _Optional[_Union[Completion, _Mapping]] = ..., ended: _Optional[_Union[EpisodeEnded, _Mapping]] = ..., refused: _Optional[_Union[RequestRefused, _Mapping]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "calls", "logprobs", "stop")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    stop: str
    def __init__(self, text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., stop: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: str
    logprob: float
    def __init__(self, token: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class RequestRefused(_message.Message):
    __slots__ = ("reason", "message", "param")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    reason: RefusedReason
    message: str
    param: str
    def __init__(self, reason: _Optional[_Union[RefusedReason, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class EpisodeEnded(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    def __init__(self, outcome: _Optional[str] = ...) -> None: ...

class CallToolRequest(_message.Message):
    __slots__ = ("sequence", "name", "arguments_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    name: str
    arguments_json: str
    def __init__(self, sequence: _Optional[int] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class CallToolResponse(_message.Message):
    __slots__ = ("output", "error", "ended")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    output: str
    error: str
    ended: EpisodeEnded
    def __init__(self, output: _Optional[str] = ..., error: _Optional[str] = ..., ended: _Optional[_Union[EpisodeEnded, _Mapping]] = ...) -> None: ...

class RecordStepRequest(_message.Message):
    __slots__ = ("step_number", "model_output", "code", "observations", "error_type", "error", "is_final_answer", "duration", "agent")
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    step_number: int
    model_output: str
    code: str
    observations: str
    error_type: str
    error: str
    is_final_answer: bool
    duration: _duration_pb2.Duration
    agent: str
    def __init__(self, step_number: _Optional[int] = ..., model_output: _Optional[str] = ..., code: _Optional[str] = ..., observations: _Optional[str] = ..., error_type: _Optional[str] = ..., error: _Optional[str] = ..., is_final_answer: bool = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., agent: _Optional[str] = ...) -> None: ...

class RecordStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendOutputRequest(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class SendOutputResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportHealthyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportHealthyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitResultRequest(_message.Message):
    __slots__ = ("stop_reason", "answer", "episode_duration", "detail", "steps", "notes", "step")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EPISODE_DURATION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    stop_reason: StopReason
    answer: bytes
    episode_duration: _duration_pb2.Duration
    detail: str
    steps: _containers.RepeatedCompositeFieldContainer[RecordStepRequest]
    notes: Notes
    step: int
    def __init__(self, stop_reason: _Optional[_Union[StopReason, str]] = ..., answer: _Optional[bytes] = ..., episode_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., detail: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[RecordStepRequest, _Mapping]]] = ..., notes: _Optional[_Union[Notes, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class SubmitResultResponse(_message.Message):
    __slots__ = ("next",)
    NEXT_FIELD_NUMBER: _ClassVar[int]
    next: NextStep
    def __init__(self, next: _Optional[_Union[NextStep, _Mapping]] = ...) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("stream", "open", "data", "credit", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: int
    open: int
    data: bytes
    credit: int
    end: StreamEnd
    def __init__(self, stream: _Optional[int] = ..., open: _Optional[int] = ..., data: _Optional[bytes] = ..., credit: _Optional[int] = ..., end: _Optional[_Union[StreamEnd, str]] = ...) -> None: ...
