"""Settings of what one rollout may use."""

from dataclasses import dataclass

from orchestrator.settings.kinds import MAX_TOKENS, MEBIBYTE, Integer, Number, Size, seconds
from orchestrator.settings.row import AUTO, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import MAX_PARALLEL_COMPLETIONS, AgentSpec, Limits


@dataclass(frozen=True, kw_only=True, repr=False)
class LimitSettings(
    Settings, group="Limits of one rollout", resume=Resume.DATA, commands=(*RUNS, "branch"), from_run=("branch",)
):
    """What one rollout may use."""

    rollout_timeout: float = row(
        240.0,
        seconds(above=0),
        "its own clock: time in the sandbox, not waiting for completions or host tools",
        also=("process_timeout",),
        commands=(*RUNS, "branch", "check-tasks"),
        to=(Limits, "rollout_timeout_s"),
    )
    rollout_deadline: float = row(
        3600.0, seconds(above=0), "wall clock from the assignment of the task", to=(Limits, "deadline_s")
    )
    step_timeout: float = row(60.0, seconds(above=0), "one code step", to=(AgentSpec, "step_timeout_s"))
    max_output_chars: int = row(
        20_000,
        Integer(100, 1_000_000),
        "printed output of a step, in characters",
        to=(AgentSpec, "max_output_chars"),
    )
    max_completions: int | None = row(
        None,
        Integer(1, 100_000),
        "completions; auto: 4 x max_steps + 16, a task's own max_steps where it has them",
        unset=AUTO,
    )
    max_parallel_completions: int = row(
        16,
        Integer(1, MAX_PARALLEL_COMPLETIONS),
        "completions at a time of an agent that is a program; more requests of it wait",
        to=(Limits, "parallel_completions"),
    )
    max_tool_calls: int = row(64, Integer(0, 100_000), "calls of host tools", to=(Limits, "tool_calls"))
    max_prompt_tokens: int = row(
        2_000_000, Integer(1, MAX_TOKENS), "prompt tokens of all its completions", to=(Limits, "prompt_tokens")
    )
    max_sampled_tokens: int = row(
        200_000, Integer(1, MAX_TOKENS), "tokens sampled in all its completions", to=(Limits, "completion_tokens")
    )
    max_proxy_bytes: int = row(
        64 * MEBIBYTE,
        Size(64 * 1024),
        "bytes its sandbox may send and receive, without attachments",
        resume=Resume.SIZE,
        to=(Limits, "proxy_bytes"),
    )
    max_cpu_seconds: float | None = row(
        None,
        Number(above=0),
        "CPU time of its sandbox, start included; checked at each request",
        to=(Limits, "cpu_s"),
    )
