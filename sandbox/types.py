"""The vocabulary of the sandbox: frozen values, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout_api.v1 import sandbox_pb2 as pb

OUTPUT_FOLDER = "output"  # in the workspace: files left there are sent to the orchestrator
SOCKET_NAME = "s"  # the orchestrator's gRPC socket, in the channel directory
TETHER_NAME = "t"  # the socket that hangs up when the orchestrator ends


@dataclass(frozen=True, slots=True)
class Identities:
    """Users inside the container. Model-written code runs as `worker_uid`, and nothing of the runner's does."""

    runner_uid: int
    worker_uid: int
    channel_gid: int


@dataclass(frozen=True, slots=True)
class AgentUser:
    """Whom model-written code runs as in a user namespace of its own, where it may be root. `namespace`: the
    descriptor of that namespace, whose owner is the worker's uid."""

    namespace: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Box:
    """The places and identities this sandbox was started with. `identities` None: everything runs as one user.
    `preload`: modules to import before there is a task, for an agent that is a program. `environment`: the
    image's, (name, value), for the agent's processes. `agent` None: there is no user namespace, and code runs as
    the worker's uid."""

    channel: Path
    attachments: Path
    workspace: Path
    identities: Identities | None
    worker_processes: int
    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    agent: AgentUser | None = None

    @property
    def socket(self) -> Path:
        """Where the orchestrator listens."""
        return self.channel / SOCKET_NAME

    @property
    def tether(self) -> Path:
        """The socket that hangs up when the orchestrator ends."""
        return self.channel / TETHER_NAME


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as smolagents describes it. `inputs`: argument name to type, description, nullable."""

    name: str
    description: str
    inputs: Mapping[str, Mapping[str, Any]]
    output_type: str


@dataclass(frozen=True, slots=True)
class SandboxTool:
    """A tool that runs in the code worker: the function `spec.name` of a module with this source."""

    spec: ToolSpec
    module: str
    source: str


AgentKind = Literal["code", "tool_calling", "shell", "program"]


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How the agent is built and what a code step may use. For a program, each completion is a step."""

    max_steps: int
    step_timeout_s: float
    planning_interval: int | None = None
    code_tags: tuple[str, str] = ("<code>", "</code>")
    final_answer_at_max_steps: bool = False
    authorized_imports: tuple[str, ...] = ("*",)
    instructions: str | None = None
    verbosity: int = 0
    max_output_chars: int = 20_000
    kind: AgentKind = "code"
    prompt_templates: Mapping[str, Any] | None = None
    managed_agents: Sequence[pb.ManagedAgent] = ()
    calls_as_data: bool = False  # of agents that call tools; False: their calls are in the text of a completion
    max_parallel_completions: int = 1  # of a program, at a time
    max_token_length: int = 0  # that a conversation may have; 0: not known


@dataclass(frozen=True, slots=True)
class Place:
    """Where model-written code works. `cwd`: an absolute path; empty: the workspace. `environment`: variables."""

    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSetup:
    """What is done before a step, in this order. None, or empty: nothing."""

    files: Sequence[pb.ProgramFile] = ()
    command: pb.Healthcheck | None = None
    healthcheck: pb.Healthcheck | None = None


@dataclass(frozen=True, slots=True)
class NextStep:
    """The next instruction, in the same sandbox and the same conversation."""

    question: str
    setup: StepSetup = StepSetup()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rollout: what to solve and under which rules. `healthcheck`: what has to succeed before the agent
    begins; None: nothing. `context`: what was said before. `steps`: how many instructions there are; `setup`: what
    is done before the first. `listeners`: where its programs find what is outside.
    `output` None: no files are asked for."""

    question: str
    agent: AgentSettings
    host_tools: Sequence[ToolSpec] = ()
    attachments: Sequence[pb.AttachmentFile] = ()
    sandbox_tools: Sequence[SandboxTool] = ()
    program: Sequence[pb.ProgramFile] = ()
    place: Place = Place()
    healthcheck: pb.Healthcheck | None = None
    output: pb.OutputLimits | None = None
    context: "Sequence[Message]" = ()
    steps: int = 1
    setup: StepSetup = StepSetup()
    listeners: Sequence[pb.Listener] = ()
    authorities: bytes = b""  # certificates, PEM


Kind = Literal["action", "plan", "final"]
Role = Literal["system", "user", "assistant", "tool"]
Tools = tuple[Mapping[str, Any], ...]  # in the form of OpenAI's chat completions
ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool. `arguments`: JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `calls`: tools that an assistant calls; `call_id`: the call that a tool answers;
    `name`: who speaks."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Notes:
    """Of a program's requests, for people: fields that had no effect, and requests that were not served."""

    unused_fields: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a completion. `response_format`: in the form of OpenAI's chat completions.

    `tool_name`: the one tool that must be called. An assistant's message at the end is continued. `count_only`:
    nothing is sampled, the tokens of the prompt are counted. `notes`: what was noted since the request before.
    """

    messages: tuple[Message, ...]
    stop: tuple[str, ...] = ()
    tools: Tools = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    response_format: Mapping[str, Any] | None = None
    logprobs: bool = False
    count_only: bool = False
    notes: Notes = field(default=Notes(), compare=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's text and its log-prob."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, cut before its stop string (`stop`, where it is known). `text` is without the calls."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Literal["stop", "length"] = "stop"
    calls: tuple[Call, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as the sandbox tells it. The orchestrator shows it and trusts nothing in it."""

    step_number: int
    model_output: str
    code: str
    observations: str
    error_type: str
    error: str
    is_final_answer: bool
    duration_s: float
    agent: str = ""  # the managed agent's name; empty: the main agent


StopReason = Literal["final_answer", "max_steps", "no_answer", "out_of_memory", "crashed", "bad_task"]


@dataclass(frozen=True, slots=True)
class Result:
    """How the episode ended. `answer` is bytes: the orchestrator decides whether they are text."""

    stop_reason: StopReason
    answer: bytes | None = None
    detail: str = ""
    notes: Notes = Notes()
