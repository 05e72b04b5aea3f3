"""The configuration: everything an operator decides, and the specs for agents, sandboxes, limits and sampling."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.plan import sandbox_of
from orchestrator.rules.redact import Secret
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.types import STORAGE_INODES, AgentSpec, Limits, Sampling, SandboxSpec, Task

STREAM_ROOM_BYTES = 2 << 30
"""What a rollout's streams may carry besides egress: services, TLS, refusals."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything an operator decides, valid and frozen."""

    env: EnvSettings = field(default_factory=EnvSettings)
    openai: tuple[OpenAISettings, ...] = (OpenAISettings(),)
    tavily_api_key: Secret = Secret()
    judge_api_key: Secret = Secret()

    def __post_init__(self) -> None:
        if not self.openai:
            raise ConfigError("openai: name at least one server")

    def public(self) -> dict[str, Any]:
        """All settings as plain JSON values, without keys and without credentials in URLs."""
        secrets = [secret for server in self.openai for secret in server.hidden()]
        hidden = (*secrets, self.tavily_api_key, self.judge_api_key)
        return {"env": self.env.public(*hidden), "openai": [server.public(*hidden) for server in self.openai]}

    def require_endpoint(self) -> None:
        """Raises ConfigError unless every server has an address."""
        if not all(server.base_url for server in self.openai):
            raise ConfigError(
                "no inference endpoint: set --openai.base_url URL and --openai.model_name NAME, "
                "or run `orchestrator demo`, which needs neither"
            )

    @property
    def startup_timeout(self) -> float:
        """How long an endpoint that is still loading is waited for, in seconds: the longest of the servers'."""
        return max(server.startup_timeout for server in self.openai)

    def agent_spec(self) -> AgentSpec:
        """How agents are built. Which format calls of tools have is decided when the model is known."""
        env = self.env
        return env.fill(
            AgentSpec, kind=env.agent_kind, main_line=env.main_line or ("longest" if env.program else "question")
        )

    def sandbox_spec(self, task: Task | None = None) -> SandboxSpec:
        """What sandboxes are made of for rollouts of this task; None: of one that asks for nothing of its own."""
        env = self.env
        runtime = env.docker_runtime if env.takes_docker else Path(env.oci_runtime).name
        storage = (env.sandbox_storage, STORAGE_INODES) if env.sandbox_root == "writable" else (0, 0)
        spec = env.fill(SandboxSpec, runtime=runtime, storage_bytes=storage[0], storage_inodes=storage[1])
        return spec if task is None else sandbox_of(task, spec, env.sandbox_storage)

    def limits(self, agent: AgentSpec | None = None) -> Limits:
        """What one rollout of this agent may use, unless its task says otherwise. None: the run's agent."""
        steps = (agent or self.agent_spec()).max_steps
        return self.env.fill(
            Limits,
            completions=self.env.max_completions or 4 * steps + 16,
            stream_bytes=self.env.max_egress_bytes + STREAM_ROOM_BYTES,
        )

    def sampling(self, limits: Limits | None = None) -> Sampling:
        """How completions of a rollout with these limits are sampled. None: the run's limits.

        The seed is the run's; each plan derives its own from it.
        """
        longest = (limits or self.limits()).max_token_length
        max_tokens = min(self.env.max_completion_tokens, longest)
        return self.env.fill(Sampling, max_tokens=max_tokens, seed=self.env.seed or 0)
