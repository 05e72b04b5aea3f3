"""The vocabulary: frozen values that every layer shares. No I/O, no clock, no randomness.

Axes: T tokens of one trajectory, G members of one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]  # what a rollout is for; some servers keep the two apart


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, text only."""

    role: Role
    content: str


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that comes with a task. `name` is what the agent sees: one safe path component."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and what grades it. `answer` and `metadata` never leave the orchestrator."""

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


@dataclass(frozen=True, slots=True)
class BadTask:
    """A row no task could be made of: reported as outcome `bad_task`, and the run goes on."""

    task_id: str
    reason: str


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every sampling parameter, sent explicitly with each call. top_k off, min_p 0, neutral penalties."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


AgentKind = Literal["code", "tool_calling", "program"]


@dataclass(frozen=True, slots=True)
class ManagedAgent:
    """An agent the main one can call like a tool. None: all tools, as many steps, of the kind of the main one."""

    name: str
    description: str
    tools: tuple[str, ...] | None = None
    max_steps: int | None = None
    kind: AgentKind | None = None

    def given(self) -> dict[str, Any]:
        """As an operator writes it."""
        named = {"tools": self.tools, "max_steps": self.max_steps, "agent": self.kind}
        optional = {key: value for key, value in named.items() if value is not None}
        return {"name": self.name, "description": self.description, **optional}


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """How the agent in the sandbox is built. A program's steps are its completions."""

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

    @property
    def closing_tag(self) -> str:
        """What an agent may put behind a completion: smolagents' code agents close their tag."""
        kinds = {self.kind, *(agent.kind for agent in self.managed_agents)}
        return self.code_tags[1] if "code" in kinds else ""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox is made of. Sandboxes of equal specs are interchangeable."""

    image: str
    memory_bytes: int = 1 << 30
    cpus: float = 1.0
    pids: int = 128
    runtime: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rollout may use. Times in seconds."""

    rollout_timeout_s: float = 240.0
    deadline_s: float = 3600.0
    max_token_length: int = 16_384
    completions: int = 64
    tool_calls: int = 64
    prompt_tokens: int = 2_000_000
    completion_tokens: int = 200_000
    proxy_bytes: int = 64 << 20
    cpu_s: float | None = None  # None: as much as it likes


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One attempt, decided before anything starts. A retry is a new plan with the next `attempt`."""

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


# ---------------------------------------------------------------- what the proxy served


class CompletionKind(StrEnum):
    """What a completion is for; decides its stop strings."""

    ACTION = "action"
    PLAN = "plan"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as the inference server produced it. T = tokens sampled.

    `text` is all that was sampled where the endpoint tells (stop string and end-of-turn token
    included), else what it gave. `visible` is what the agent gets: cut before the stop string.
    `logprobs_T`: natural log, raw model distribution (temperature 1, whole vocabulary).
    `retries`: how often the endpoint was asked in vain before; the seed was the same each time.
    `reasoning_chars`: that many characters of `text`, from its beginning, are reasoning; `visible` comes behind.
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

    def __post_init__(self) -> None:
        tokens, logprobs = self.tokens_T, self.logprobs_T
        if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probs")

    @property
    def reasoning(self) -> str:
        """What the agent did not get because it is no answer yet, tags included."""
        return self.text[: self.reasoning_chars]

    @property
    def unseen(self) -> str:
        """What was sampled behind what the agent got: a stop string, the end of the turn."""
        return self.text[self.reasoning_chars :].removeprefix(self.visible)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as it was asked for and served.

    `kept` leading messages of the previous turn's conversation came again; `messages` are the ones
    after them. `segment` counts id lines: a turn that does not continue the line opens the next one.
    `prompt_ids` are the ids added to the line before sampling (all of them in a segment's first
    turn); None where the endpoint takes no ids. `closing` is the text the agent put behind the
    segment's previous completion (its code tag, when sampling stopped without one). `agent` is the
    managed agent that asked, as the sandbox tells; empty: the main one.
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

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the main agent. A managed agent's are part of the step that called it."""
        return self.kind is CompletionKind.ACTION and not self.agent


class Prompted(Protocol):
    """What continues the conversation of the completion before it."""

    @property
    def kept(self) -> int: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...


def conversations(turns: Iterable[Prompted]) -> Iterator[tuple[Message, ...]]:
    """The whole conversation each completion was asked with, rebuilt from the differences on record."""
    talk: tuple[Message, ...] = ()
    for turn in turns:
        talk = (*talk[: turn.kept], *turn.messages)
        yield talk


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
    """One agent step as the sandbox tells it. Untrusted: for display only."""

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
    """A mount in a sandbox as its pid 1 sees it; the last two are of tmpfs, else 0."""

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
    """A file that model-written code left. `path`: below the rollout's folder, safe to open there."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Output:
    """What came back of the sandbox's `output/`. `left_out`: links, devices, over the limits, by its own count.

    `complete` False: the stream broke off, and these are the files that had come.
    """

    files: tuple[OutputFile, ...] = ()
    left_out: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a sandbox reports of its own limits, from /proc of its pid 1.

    `limits`: memory, memory_and_swap (bytes), cpu_millis, pids, and hard ulimits by name; what is missing is
    unlimited or not told. `exposed_paths`: places that show or give more than a sandbox may have.
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
class Record:
    """All that the orchestrator itself saw of one attempt. Times in seconds since `started_at`."""

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
    output: Output | None = None  # None: nothing was asked for, or the rollout did not come that far

    @property
    def action_steps(self) -> int:
        """Steps of the main agent, by what was served."""
        return sum(turn.is_step for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled over all turns, by the endpoint's count."""
        return sum(turn.completion.completion_tokens for turn in self.turns)


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
    """Ends that are nobody's policy: never scored."""

    LLM_ERROR = "llm_error"
    TOOL_ERROR = "tool_error"
    LAUNCH_ERROR = "launch_error"
    SANDBOX_LOST = "sandbox_lost"
    DOCKER_ERROR = "docker_error"
    BAD_TASK = "bad_task"
    SCORER_ERROR = "scorer_error"
    RECORD_ERROR = "record_error"
    CANCELLED = "cancelled"


RETRIED = frozenset(
    {
        FailedName.LLM_ERROR,
        FailedName.TOOL_ERROR,
        FailedName.LAUNCH_ERROR,
        FailedName.SANDBOX_LOST,
        FailedName.DOCKER_ERROR,
    }
)


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout came to an end that is scored. `detail` names the limit for `budget`."""

    name: EndedName
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rollout broke. There is no reward here, so nobody can train on a lost container."""

    name: FailedName
    reason: str


Outcome = Ended | Failed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One plan carried out: what was recorded and the one outcome.

    `ungraded`: how the rollout had ended, where it is `cancelled` because the run was stopped while it was graded.
    """

    plan: RolloutPlan
    record: Record
    outcome: Outcome
    ungraded: Ended | None = None


def last_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """What became of each rollout of a group in the end, by its place."""
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

    `logprobs_T` holds the sampled log-probability at trained places and is None where the endpoint
    gives none; its values at other places mean nothing. `segment`: which id line of the episode it is.
    `note`: what is special about it, for the record.
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
    """What a scorer says: a finite number in [0, 1], the parts it is made of, and what it rests on.

    `evidence`: JSON, for a score that cannot be made again from the record, as a judge's. Its `failure` says what
    went wrong with grading where that is this rollout's own doing.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"a score lies in [0, 1], this one is {self.value}")

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved, by the scorer's own word."""
        return is_solved(self.value, self.parts)

    @property
    def failure(self) -> str:
        """Why the scorer gave no score of its own, where that is this rollout's own doing; else empty."""
        return str(self.evidence.get("failure", ""))


def is_solved(value: float, parts: Mapping[str, float]) -> bool:
    """The one rule: the scorer's `correctness` where it tells one, else its value; at least 1 is solved."""
    return parts.get("correctness", value) >= 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One scored rollout of a group."""

    attempt: Attempt
    trajectory: Trajectory
    score: Score


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
