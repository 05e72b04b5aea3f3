"""Builds the smolagents agent: our Model, our PythonExecutor, tools as the prompt shows them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smolagents.agents
import yaml
from rich.console import Console
from rich.text import Text
from smolagents.agents import CodeAgent
from smolagents.memory import ActionStep
from smolagents.models import ChatMessage
from smolagents.monitoring import AgentLogger
from smolagents.tools import Tool

from sandbox.errors import StepsUsedUp
from sandbox.executor import WorkerExecutor
from sandbox.model import OrchestratorModel
from sandbox.tools.files import FILE_TOOLS
from sandbox.types import AgentSettings, StepReport, ToolSpec

_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as quick, where it was compiled
OnStep = Callable[[StepReport], None]


class SandboxAgent(CodeAgent):
    """A CodeAgent that ends at its last step instead of asking the model for one more answer."""

    def __init__(self, *, final_answer_at_max_steps: bool, **kwargs: Any) -> None:
        self._final_answer_at_max_steps = final_answer_at_max_steps
        super().__init__(**kwargs)

    @functools.cached_property
    def _rendered_prompt(self) -> str:
        return str(super().initialize_system_prompt())

    def initialize_system_prompt(self) -> str:
        """Asked for several times in a run, and slow to render; nothing it shows changes."""
        return self._rendered_prompt

    def provide_final_answer(self, task: str) -> ChatMessage:
        """smolagents' own extra completion, where it was asked for. Raises StepsUsedUp elsewhere."""
        if not self._final_answer_at_max_steps:
            raise StepsUsedUp
        return super().provide_final_answer(task)


class _Log(AgentLogger):
    """smolagents' log on stderr. Formats nothing that will not be shown: formatting took most of a step."""

    def __init__(self, verbosity: int) -> None:
        super().__init__(level=verbosity - 1, console=Console(stderr=True, highlight=False))

    def _shown(self, level: Any) -> bool:
        return bool(level <= self.level)

    def log_markdown(self, content: str, title: str | None = None, level: Any = 1, **kwargs: Any) -> None:
        self.log_code(title or "", content, level)

    def log_code(self, title: str, content: str, level: Any = 1) -> None:
        if self._shown(level):  # without colours: what finds them in a text is a tenth of all there is to import
            self.console.print(Text(f"{title}\n{content}"))

    def log_rule(self, title: str, level: Any = 1) -> None:
        if self._shown(level):
            super().log_rule(title, level)

    def log_task(self, content: str, subtitle: str, title: str | None = None, level: Any = 1) -> None:
        if self._shown(level):
            super().log_task(content, subtitle, title, level)


class _PromptTool(Tool):
    """A tool as the prompt describes it. What the model-written code calls lives in the worker."""

    skip_forward_signature_validation = True

    def __init__(self, spec: ToolSpec) -> None:
        self.name = spec.name
        self.description = spec.description
        self.inputs = {name: dict(shape) for name, shape in spec.inputs.items()}
        self.output_type = spec.output_type
        super().__init__()


def build_agent(
    settings: AgentSettings,
    model: OrchestratorModel,
    executor: WorkerExecutor,
    host_tools: tuple[ToolSpec, ...],
    on_step: OnStep,
) -> SandboxAgent:
    """An agent for one run."""
    return SandboxAgent(
        tools=[_PromptTool(spec) for spec in (*FILE_TOOLS, *host_tools)],
        model=model,
        executor=executor,
        prompt_templates=_prompt_templates(),
        instructions=settings.instructions,
        max_steps=settings.max_steps,
        planning_interval=settings.planning_interval,
        additional_authorized_imports=list(settings.authorized_imports),
        code_block_tags=settings.code_tags,
        max_print_outputs_length=settings.max_output_chars,
        final_answer_at_max_steps=settings.final_answer_at_max_steps,
        step_callbacks={ActionStep: lambda step: on_step(_report(step))},
        logger=_Log(settings.verbosity),
    )


# Compiled again for every agent, they were most of the time from an assignment to its first completion.
smolagents.agents.Template = functools.cache(smolagents.agents.Template)


@functools.cache
def _prompt_templates() -> Any:
    """smolagents' own; read once, while the sandbox gets ready."""
    source = Path(smolagents.agents.__file__).with_name("prompts") / "code_agent.yaml"
    return yaml.load(source.read_text("utf-8"), _YamlLoader)  # noqa: S506 - a safe one


def _report(step: ActionStep) -> StepReport:
    return StepReport(
        step_number=step.step_number,
        model_output=step.model_output if isinstance(step.model_output, str) else "",
        code=step.code_action or "",
        observations=step.observations or "",
        error_type=type(step.error).__name__ if step.error else "",
        error=str(step.error) if step.error else "",
        is_final_answer=step.is_final_answer,
        duration_s=step.timing.duration or 0.0,
    )
