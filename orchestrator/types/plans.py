"""What one rollout is to be: fixed before it begins.

The specs are filled from the settings, which have the defaults. A default here is what a record means that an
earlier version wrote, before there was such a field.
"""

from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.types.prefix import Prefix
from orchestrator.types.tasks import Task

Split = Literal["train", "eval"]  # purpose of a rollout; some servers treat the two differently


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that vary. The others are fixed: top_k off, min_p 0, neutral penalties."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


AgentKind = Literal["code", "tool_calling", "shell", "program"]
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

    def as_setting(self) -> dict[str, Any]:
        """The settings as an operator writes them."""
        named = {"tools": self.tools, "max_steps": self.max_steps, "agent": self.kind}
        optional = {key: value for key, value in named.items() if value is not None}
        return {"name": self.name, "description": self.description, **optional}


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """How the agent in the sandbox is built. For a program, each completion counts as a step.

    `call_format`: how agents that call tools, of the team too, do so. None: in their text, smolagents' by JSON, a
    shell agent by a fenced block. `main_line`: which line of ids is the main one.
    """

    max_steps: int
    step_timeout_s: float
    planning_interval: int | None
    code_tags: tuple[str, str]
    final_answer_at_max_steps: bool
    authorized_imports: tuple[str, ...]
    instructions: str | None
    verbosity: int
    max_output_chars: int
    kind: AgentKind
    managed_agents: tuple[ManagedAgent, ...]
    call_format: CallFormat | None = None
    main_line: MainLine = "question"

    def kind_of(self, name: str) -> AgentKind:
        """The kind of the managed agent of this name; of the main agent for another one."""
        return next((agent.kind for agent in self.managed_agents if agent.name == name), None) or self.kind

    @property
    def calls_tools(self) -> bool:
        """Whether it is smolagents' tool-calling agent, or one of its team is; or a shell agent."""
        return bool({"tool_calling", "shell"} & {self.kind, *(agent.kind for agent in self.managed_agents)})

    @property
    def closing_tag(self) -> str:
        """The text an agent may append to a completion: smolagents' code agents add the closing code tag."""
        kinds = {self.kind, *(agent.kind for agent in self.managed_agents)}
        return self.code_tags[1] if "code" in kinds else ""


Root = Literal["read-only", "writable"]
MIN_MEMORY_BYTES = 256 << 20  # what a sandbox needs
STORAGE_INODES = 100_000  # files and folders that fit into a writable root


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox is made of. Sandboxes of equal specs are interchangeable. `preload`: modules that are
    imported before there is a task.

    `root`: whether its whole file system can be written to; then the agent may be root inside. `storage_bytes` and
    `storage_inodes` bound what is written, on top of the memory; 0 with a read-only root. `layers`: absolute paths
    of unpacked, content-addressed folders that are laid over the image, top first; they need a writable root.
    `user`: as Docker's USER, a name or uid[:gid], for the agent's processes; None: the image's. With a read-only
    root the agent has a uid of its own instead. Raises ValueError for what does not go together.
    """

    image: str
    memory_bytes: int
    cpus: float
    pids: int
    runtime: str | None  # None: the launcher's own
    preload: tuple[str, ...] = ()
    root: Root = "read-only"
    storage_bytes: int = 0
    storage_inodes: int = 0
    layers: tuple[str, ...] = ()
    user: str | None = None

    def __post_init__(self) -> None:
        bounds = self.storage_bytes, self.storage_inodes
        if self.is_writable and min(bounds) <= 0:
            raise ValueError(f"a writable root needs bounds: it has {bounds[0]} bytes and {bounds[1]} inodes")
        if not self.is_writable and (any(bounds) or self.layers):
            raise ValueError("storage and layers need a writable root")

    @property
    def is_writable(self) -> bool:
        """Whether its root is."""
        return self.root == "writable"

    @property
    def is_on_disk(self) -> bool:
        """Whether what is written to the root is too much for memory."""
        return self.storage_bytes > self.memory_bytes

    @property
    def memory_limit_bytes(self) -> int:
        """Memory for processes and for all that is written into memory."""
        return self.memory_bytes + (0 if self.is_on_disk else self.storage_bytes)


MAX_PARALLEL_COMPLETIONS = 32  # of one rollout: each may hold a conversation of megabytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rollout may use. Times in seconds."""

    rollout_timeout_s: float
    deadline_s: float
    max_token_length: int
    completions: int
    tool_calls: int
    prompt_tokens: int
    completion_tokens: int
    proxy_bytes: int
    cpu_s: float | None  # None: no limit
    parallel_completions: int = 16  # of a program, at a time
    stream_bytes: int = 4 << 30  # of what passes through its listeners, both ways


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One attempt, fixed before anything starts. A retry is a new plan with the next `attempt`.

    `group_size`: how many rollouts its group is to have. None: read from a record that does not say it.
    `prefix`: the recorded beginning that a fresh sandbox is brought to first. None: it begins with the task.
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
    prefix: Prefix | None = None
