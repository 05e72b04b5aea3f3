"""The vocabulary: frozen values that all layers share. No I/O, no clock, no randomness.

Axes: T tokens of one trajectory, G members of one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, compress, count
from operator import is_not
from pathlib import Path
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]  # purpose of a rollout; some servers treat the two differently


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, text only."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as the model wrote it. `arguments`: the text of a JSON object."""

    id: str
    name: str
    arguments: str


Tools = tuple[Mapping[str, Any], ...]  # that an agent offers its model, in the form of OpenAI's chat completions


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an agent asks for besides a text; smolagents' agents ask for tools alone.

    `tool_name`: the one tool that must be called. `response_format`: as OpenAI's, empty for any text."""

    tools: Tools = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    response_format: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False

    @property
    def demands(self) -> bool:
        """Whether a tool must be called."""
        return self.tool_choice == "required" and bool(self.tools)

    @property
    def demanded(self) -> Mapping[str, Any] | None:
        """The function of the one tool that must be called. None: none must, or one of several."""
        functions = [tool["function"] for tool in self.tools if self.tool_name in ("", tool["function"]["name"])]
        return functions[0] if self.demands and len(functions) == 1 else None


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a task. `name`: as the agent sees it, one safe path component."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and what grades it. `answer`, `other_answers` (as right as that one) and `metadata` never reach a
    sandbox."""

    task_id: str
    question: str
    answer: str | None = None
    attachments: tuple[Attachment, ...] = ()
    level: str | None = None
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    scorer: str | None = None
    image: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    other_answers: tuple[str, ...] = ()

    @property
    def reference(self) -> str | None:
        """Every right answer, for people and judges."""
        return None if self.answer is None else "\nOR\n".join((self.answer, *self.other_answers))


@dataclass(frozen=True, slots=True)
class BadTask:
    """A row that no task could be made of. It is reported as outcome `bad_task`, and the run goes on."""

    task_id: str
    reason: str


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that vary. The others are fixed: top_k off, min_p 0, neutral penalties."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


AgentKind = Literal["code", "tool_calling", "program"]
# Which line of a rollout is its main one: the one with the most sampled tokens, that of the first completion, that
# of the last one, or the one that begins with the task.
MainLine = Literal["longest", "first", "last", "question"]
# How models write calls of tools, each as its chat templates print them.
CallFormat = Literal["hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "gpt_oss"]


@dataclass(frozen=True, slots=True)
class ManagedAgent:
    """An agent the main one can call like a tool. None means: all tools; as many steps, or the kind, of the main
    agent."""

    name: str
    description: str
    tools: tuple[str, ...] | None = None
    max_steps: int | None = None
    kind: AgentKind | None = None

    def given(self) -> dict[str, Any]:
        """The settings as an operator writes them."""
        named = {"tools": self.tools, "max_steps": self.max_steps, "agent": self.kind}
        optional = {key: value for key, value in named.items() if value is not None}
        return {"name": self.name, "description": self.description, **optional}


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """How the agent in the sandbox is built. For a program, each completion counts as a step.

    `call_format`: how smolagents' tool-calling agents, of the team too, call their tools. None: by JSON in their
    text, as smolagents parses it. `main_line`: which line of ids is the main one; records of earlier versions,
    which do not say it, followed the default.
    """

    max_steps: int = 12
    step_timeout_s: float = 60.0
    planning_interval: int | None = None
    code_tags: tuple[str, str] = ("<code>", "</code>")
    final_answer_at_max_steps: bool = False
    authorized_imports: tuple[str, ...] = ("*",)
    instructions: str | None = None
    verbosity: int = 0
    max_output_chars: int = 20_000
    kind: AgentKind = "code"
    managed_agents: tuple[ManagedAgent, ...] = ()
    call_format: CallFormat | None = None
    main_line: MainLine = "question"

    def kind_of(self, name: str) -> AgentKind:
        """The kind of the managed agent of this name; of the main agent for another one."""
        return next((agent.kind for agent in self.managed_agents if agent.name == name), None) or self.kind

    @property
    def calls_tools(self) -> bool:
        """Whether it is smolagents' tool-calling agent, or one of its team is."""
        return "tool_calling" in (self.kind, *(agent.kind for agent in self.managed_agents))

    @property
    def closing_tag(self) -> str:
        """The text an agent may append to a completion: smolagents' code agents add the closing code tag."""
        kinds = {self.kind, *(agent.kind for agent in self.managed_agents)}
        return self.code_tags[1] if "code" in kinds else ""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox is made of. Sandboxes of equal specs are interchangeable. `preload`: modules that are
    imported before there is a task."""

    image: str
    memory_bytes: int = 1 << 30
    cpus: float = 1.0
    pids: int = 128
    runtime: str | None = None
    preload: tuple[str, ...] = ()


MAX_PARALLEL_COMPLETIONS = 32  # of one rollout: each may hold a conversation of megabytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rollout may use. Times in seconds."""

    rollout_timeout_s: float = 240.0
    deadline_s: float = 3600.0
    max_token_length: int = 16_384
    completions: int = 64
    parallel_completions: int = 16  # of a program, at a time
    tool_calls: int = 64
    prompt_tokens: int = 2_000_000
    completion_tokens: int = 200_000
    proxy_bytes: int = 64 << 20
    cpu_s: float | None = None  # None: no limit


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One attempt, fixed before anything starts. A retry is a new plan with the next `attempt`.

    `group_size`: how many rollouts its group is to have. None: read from a record that does not say it.
    """

    rollout_id: str
    task: Task
    group: int
    index: int
    attempt: int
    sampling: Sampling
    agent: AgentSpec
    sandbox: SandboxSpec
    limits: Limits
    split: Split = "train"
    group_size: int | None = None


# ---------------------------------------------------------------- what the proxy served


class CompletionKind(StrEnum):
    """What a completion is for. It decides the stop strings."""

    ACTION = "action"
    PLAN = "plan"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """So many tokens in a row, and the policy that sampled them. `oldest` and `newest` differ where the weights
    changed at a place among them that nobody knows; None: unknown."""

    tokens: int
    oldest: str | None
    newest: str | None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"a span of {self.tokens} tokens")

    @property
    def version(self) -> str | None:
        """The one version that sampled all of it; None: not known."""
        return self.newest if self.oldest == self.newest else None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as the inference server produced it. T = tokens sampled.

    `text`: all that was sampled (stop string and end-of-turn token included) if the endpoint returns it, else what
    it returned. `visible`: what the agent gets, cut before the stop string.
    `logprobs_T`: natural log, raw model distribution (temperature 1, whole vocabulary).
    `policy_version`: the version that sampled its last token. `spans`: which version sampled which tokens, in
    order; empty: the endpoint says no more than `policy_version`.
    `retries`: failed requests before this answer, all with the same seed.
    `reasoning_chars`: so many first characters of `text` are reasoning; `visible` comes after them.
    """

    text: str
    visible: str
    finish_reason: Literal["stop", "length", "content_filter"]
    tokens_T: tuple[int, ...] | None
    logprobs_T: tuple[float, ...] | None
    prompt_tokens: int
    completion_tokens: int
    policy_version: str | None = None
    retries: int = 0
    reasoning_chars: int = 0
    spans: tuple[PolicySpan, ...] = ()

    def __post_init__(self) -> None:
        tokens, logprobs = self.tokens_T, self.logprobs_T
        if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probs")
        if self.spans and tokens is not None and (told := sum(span.tokens for span in self.spans)) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but spans of {told}")

    def sampled_from(self, spans: tuple[PolicySpan, ...]) -> Completion:
        """The same, attributed to these policies. `spans` is kept only where it says more than a version."""
        one = len(spans) == 1 and spans[0].oldest == spans[0].newest
        version = spans[-1].newest if spans else self.policy_version
        return replace(self, policy_version=version, spans=() if one else spans)

    @property
    def sampled_by(self) -> tuple[PolicySpan, ...]:
        """Which version sampled which tokens: `spans`, else all by `policy_version`."""
        if self.spans:
            return self.spans
        return (PolicySpan(self.sampled_tokens, self.policy_version, self.policy_version),)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled: the ids, else the endpoint's count."""
        return self.completion_tokens if self.tokens_T is None else len(self.tokens_T)

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, tags included. The agent does not get it."""
        return self.text[: self.reasoning_chars]

    @property
    def unseen(self) -> str:
        """What was sampled after the text the agent got: a stop string, the end of the turn."""
        return self.text[self.reasoning_chars :].removeprefix(self.visible)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as it was asked for and served.

    The prompt is the first `kept` messages of the previous turn's conversation, then `messages`.
    `segment` counts id lines: a turn that does not continue the line opens the next one.
    `prompt_ids` are the ids added to the line before sampling (all of them in a segment's first
    turn); None if the endpoint takes no ids. `closing` is the text the agent appended to the
    segment's previous completion (its code tag, if sampling stopped without one). `agent`: the
    managed agent that asked, as the sandbox says; empty: the main one.
    `tools`: what the prompt offers. `opening`: how the answer was begun for the model, which went on behind it.
    `abandoned`: nobody got this answer, as who asked for it had hung up. The segment goes on before it.
    """

    sequence: int
    kind: CompletionKind
    kept: int
    messages: tuple[Message, ...]
    segment: int
    prompt_ids: tuple[int, ...] | None
    closing: str
    completion: Completion
    started_s: float
    ended_s: float
    agent: str = ""
    tools: Tools = ()
    opening: str = ""
    abandoned: bool = False

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the main agent. A managed agent's steps are part of the step that called it."""
        return self.kind is CompletionKind.ACTION and not self.agent


class Prompted(Protocol):
    """A completion whose conversation is stored as a difference to the one before."""

    @property
    def kept(self) -> int: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...


def conversations(turns: Iterable[Prompted]) -> Iterator[tuple[Message, ...]]:
    """The whole conversation of each completion's prompt, rebuilt from the differences on record."""
    talk: tuple[Message, ...] = ()
    for turn in turns:
        talk = (*talk[: turn.kept], *turn.messages)
        yield talk


def shared(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    """How many messages are the same at the beginning of both."""
    most = min(len(one), len(other))
    same = next(compress(count(), map(is_not, one, other)), most)  # nearly all: they are one object
    return next((at for at in range(same, most) if one[at] != other[at]), most)


def beginnings(messages: tuple[Message, ...]) -> list[int]:
    """A hash of the first n messages for each n, from none to all."""
    return list(accumulate(messages, lambda before, message: hash((before, message)), initial=0))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a host tool, as performed. Exactly one of `output` and `error` is set."""

    sequence: int
    name: str
    arguments: Mapping[str, Any]
    output: str | None
    error: str | None
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One agent step as the sandbox reports it. Untrusted: for display only."""

    step_number: int
    model_output: str
    code: str
    observations: str
    error_type: str
    error: str
    is_final_answer: bool
    duration_s: float
    agent: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount in a sandbox as its pid 1 sees it. `size_bytes` and `inodes` are 0 unless it is a tmpfs."""

    target: str
    type: str
    read_only: bool = False
    no_suid: bool = False
    no_dev: bool = False
    no_exec: bool = False
    size_bytes: int = 0
    inodes: int = 0


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that model-written code left. `path`: relative to the rollout's folder, safe to open there."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Output:
    """The files received from the sandbox's `output/`. `left_out`: the sandbox's count of files it did not send
    (links, devices, files over the limits).

    `complete` False: the stream broke off, and `files` are those received before. `folder`: where they are, for a
    scorer; empty where that is not known. It is not on record.
    """

    files: tuple[OutputFile, ...] = ()
    left_out: int = 0
    complete: bool = True
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a sandbox reports about its own limits, from /proc of its pid 1.

    `limits`: memory, memory_and_swap (bytes), cpu_millis, pids, and hard ulimits by name; a missing one is
    unlimited or unknown. `exposed_paths`: paths that show or give more than a sandbox may have.
    """

    capability_bounding_set: int
    no_new_privileges: bool
    seccomp_mode: int
    network_interfaces: tuple[str, ...]
    root_read_only: bool
    runner_uid: int
    worker_uid: int
    process_id: int
    own_control_groups: bool
    mounts: tuple[Mount, ...]
    limits: Mapping[str, int]
    devices: tuple[str, ...]
    exposed_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How a container ended. `exit_code` None: unknown."""

    exit_code: int | None
    oom_killed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """Of a program's requests, as its sandbox tells: fields that had no effect, and requests that were not served
    (on record are those after the first completion). For people."""

    unused_fields: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of one attempt. `steps` and `answer` are the sandbox's word; the orchestrator saw the rest
    itself. Times in seconds since `started_at`."""

    started_at: float  # unix time of the assignment, or of the failed launch
    turns: tuple[Turn, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    steps: tuple[Step, ...] = ()
    answer: str | None = None
    sandbox_id: str = ""
    exit: SandboxExit | None = None
    launch_s: float = 0.0
    duration_s: float = 0.0
    waiting_s: float = 0.0
    cpu_s: float | None = None
    notes: tuple[str, ...] = ()
    requests: RequestNotes = RequestNotes()
    output: Output | None = None  # None: no files were asked for, or none were received
    node: str = ""  # of a cluster; empty: the orchestrator's own machine

    @property
    def action_steps(self) -> int:
        """Steps of the main agent, counted from the turns."""
        return sum(turn.is_step for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all turns; those of a repeated prompt count again."""
        return sum(turn.completion.prompt_tokens for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled over all turns, by the endpoint's count."""
        return sum(turn.completion.completion_tokens for turn in self.turns)

    @property
    def policy_versions(self) -> tuple[str, ...]:
        """The policy versions that sampled it, in the order they came; empty if the endpoint names none."""
        spans = (span for turn in self.turns for span in turn.completion.sampled_by)
        named = (version for span in spans for version in (span.oldest, span.newest))
        return tuple(dict.fromkeys(version for version in named if version is not None))

    @property
    def policy_version(self) -> str | None:
        """The policy version that sampled last; None if the endpoint does not name it."""
        return self.turns[-1].completion.policy_version if self.turns else None


# ---------------------------------------------------------------- outcomes


class EndedName(StrEnum):
    """Ends that are the policy's own doing: scored."""

    FINISHED = "finished"
    MAX_STEPS = "max_steps"
    NO_ANSWER = "no_answer"
    INVALID_ANSWER = "invalid_answer"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CONTEXT_LENGTH = "context_length"
    OUT_OF_MEMORY = "out_of_memory"
    SANDBOX_CRASHED = "sandbox_crashed"


class FailedName(StrEnum):
    """Ends that are not the policy's doing: never scored."""

    LLM_ERROR = "llm_error"
    TOOL_ERROR = "tool_error"
    LAUNCH_ERROR = "launch_error"
    SANDBOX_LOST = "sandbox_lost"
    DOCKER_ERROR = "docker_error"
    AGENT_ERROR = "agent_error"
    BAD_TASK = "bad_task"
    SCORER_ERROR = "scorer_error"
    RECORD_ERROR = "record_error"
    CANCELLED = "cancelled"


RETRIED = frozenset(  # AGENT_ERROR once at most: a program that fails without a completion fails again, as a rule
    {
        FailedName.LLM_ERROR,
        FailedName.TOOL_ERROR,
        FailedName.LAUNCH_ERROR,
        FailedName.SANDBOX_LOST,
        FailedName.DOCKER_ERROR,
        FailedName.AGENT_ERROR,
    }
)


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout ended in a way that is scored. `detail` names the limit for `budget`."""

    name: EndedName
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rollout broke. It has no reward, so a lost container cannot become training data.

    `reason`: one line, behind which there may be more, such as the last words of a program.
    """

    name: FailedName
    reason: str

    @property
    def headline(self) -> str:
        """The first line of the reason."""
        return self.reason.partition("\n")[0]


Outcome = Ended | Failed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One plan carried out: its record and its outcome.

    `ungraded`: how the rollout ended, if the outcome is `cancelled` because the run was stopped during grading.
    """

    plan: RolloutPlan
    record: Record
    outcome: Outcome
    ungraded: Ended | None = None


def last_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The last attempt of each rollout of a group, in the order of the places."""
    last: dict[int, Attempt] = {}
    for attempt in attempts:
        known = last.get(attempt.plan.index)
        if known is None or attempt.plan.attempt > known.plan.attempt:
            last[attempt.plan.index] = attempt
    return [last[index] for index in sorted(last)]


# ---------------------------------------------------------------- training data


TokenSource = Literal["sampled", "retokenized", "none"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Token-level record of an episode. `trained_T` marks the tokens to learn from.

    `logprobs_T` holds the sampled log-probability at trained places, and no meaningful value at others. It is
    None if the endpoint gives none. `segment`: which id line of the episode this is. `note`: a remark for the
    record.
    """

    tokens_T: tuple[int, ...]
    trained_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...] | None
    messages: tuple[Message, ...]
    token_source: TokenSource
    segment: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_T), len(self.trained_T)}
        if self.logprobs_T is not None:
            lengths.add(len(self.logprobs_T))
        if len(lengths) != 1:
            raise ValueError(f"tokens, mask and log-probs differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's verdict: a finite number in [0, 1], its parts, and the evidence for it.

    `evidence`: JSON, for a score that cannot be computed again from the record, such as a judge's. Its `failure`
    says what went wrong with grading, if that is the rollout's own doing.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"a score lies in [0, 1], this one is {self.value}")

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved."""
        return is_solved(self.value, self.parts)

    @property
    def failure(self) -> str:
        """Why the scorer gave no score of its own, if that is this rollout's own doing; else empty."""
        return str(self.evidence.get("failure", ""))


def is_solved(value: float, parts: Mapping[str, float]) -> bool:
    """A task is solved if the part `correctness`, or the value if there is no such part, is at least 1."""
    return parts.get("correctness", value) >= 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One scored rollout of a group. `staleness`: how many versions the oldest policy that sampled some of it was
    behind when the group was whole; None: unknown."""

    attempt: Attempt
    trajectory: Trajectory
    score: Score
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task, to be compared with each other.

    `dropped` says why the group is no training data; None: it is complete.
    """

    number: int
    task: Task
    members_G: tuple[Member, ...]
    attempts: tuple[Attempt, ...]
    dropped: str | None = None
