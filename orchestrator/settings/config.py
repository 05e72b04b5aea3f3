"""The configuration: everything an operator decides, and the specs for agents, sandboxes, limits and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret
from orchestrator.settings.table import EnvSettings, OpenAISettings
from orchestrator.types import AgentSpec, Limits, Sampling, SandboxSpec


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything an operator decides, valid and frozen."""

    env: EnvSettings = field(default_factory=EnvSettings)
    openai: tuple[OpenAISettings, ...] = (OpenAISettings(),)
    tavily_api_key: Secret = Secret()  # noqa: RUF009 - immutable
    judge_api_key: Secret = Secret()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        if not self.openai:
            raise ConfigError("openai: name at least one server")

    def public(self) -> dict[str, Any]:
        """All settings as plain JSON values, without keys and without credentials in URLs."""
        secrets = [secret for server in self.openai for secret in server.secrets()]
        hidden = (*secrets, self.tavily_api_key, self.judge_api_key)
        return {"env": self.env.public(*hidden), "openai": [server.public(*hidden) for server in self.openai]}

    def require_endpoint(self) -> None:
        """Raises ConfigError unless every server has an address."""
        if not all(server.base_url for server in self.openai):
            raise ConfigError(
                "no inference endpoint: set --openai.base_url URL and --openai.model_name NAME, "
                "or run `orchestrator demo`, which needs neither"
            )

    def agent_spec(self) -> AgentSpec:
        """How agents are built."""
        env = self.env
        return AgentSpec(
            max_steps=env.max_steps,
            step_timeout_s=env.step_timeout,
            planning_interval=env.planning_interval,
            final_answer_at_max_steps=env.final_answer_at_max_steps,
            instructions=env.instructions,
            verbosity=env.agent_verbosity,
            max_output_chars=env.max_output_chars,
            code_tags=env.code_block_tags,
            authorized_imports=env.authorized_imports,
            kind=env.agent_kind,
            managed_agents=env.managed_agents,
            main_line=env.main_line or ("longest" if env.program else "question"),
        )

    def sandbox_spec(self) -> SandboxSpec:
        """What sandboxes are made of, unless a task names another image."""
        env = self.env
        return SandboxSpec(
            image=env.sandbox_image,
            memory_bytes=env.sandbox_memory,
            cpus=env.sandbox_cpus,
            pids=env.sandbox_pids,
            runtime=Path(env.oci_runtime).name if env.launcher == "oci" else env.docker_runtime,
            preload=env.program_preload,
        )

    def limits(self, agent: AgentSpec | None = None) -> Limits:
        """What one rollout of this agent may use, unless its task says otherwise. None: the run's agent."""
        env, agent = self.env, agent or self.agent_spec()
        return Limits(
            rollout_timeout_s=env.rollout_timeout,
            deadline_s=env.rollout_deadline,
            max_token_length=env.max_token_length,
            completions=env.max_completions or 4 * agent.max_steps + 16,
            parallel_completions=env.max_parallel_completions,
            tool_calls=env.max_tool_calls,
            prompt_tokens=env.max_prompt_tokens,
            completion_tokens=env.max_sampled_tokens,
            proxy_bytes=env.max_proxy_bytes,
            cpu_s=env.max_cpu_seconds,
        )

    def sampling(self, limits: Limits | None = None) -> Sampling:
        """How completions of a rollout with these limits are sampled. None: the run's limits.

        The seed is the run's; each plan derives its own from it.
        """
        env, limits = self.env, limits or self.limits()
        return Sampling(
            temperature=env.temperature,
            top_p=env.top_p,
            max_tokens=min(env.max_completion_tokens, limits.max_token_length),
            seed=env.seed or 0,
        )
