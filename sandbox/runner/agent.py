"""Builds smolagents' agents: our Model, our PythonExecutor, tools as the prompt shows them."""

import functools
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import smolagents.agents
from jinja2 import Environment, StrictUndefined, Template
from smolagents.agents import CodeAgent, MultiStepAgent, ToolCallingAgent, ToolOutput
from smolagents.memory import ActionStep, MemoryStep, ToolCall
from smolagents.models import ChatMessage, MessageRole
from smolagents.monitoring import AgentLogger, LogLevel, Timing
from smolagents.utils import AgentError

from sandbox.boot.compiled import remembered
from sandbox.errors import StepsUsedUp
from sandbox.runner.context import before
from sandbox.runner.executor import WorkerExecutor
from sandbox.runner.model import Complete, OrchestratorModel
from sandbox.runner.tool_calling import DATA_PROMPT, CalledTool, called_tools, in_words
from sandbox.runner.wire import agent_kind
from sandbox.types import AgentKind, AgentSettings, Assignment, Call, Message, StepReport, ToolSpec
from sandbox.worker.tools import FILE_TOOLS

OnStep = Callable[[StepReport], None]
NewExecutor = Callable[[AgentKind, str, Mapping[str, ToolSpec]], WorkerExecutor]  # kind, agent's name, its tools
_TEMPLATES: dict[AgentKind, str] = {"code": "code_agent", "tool_calling": "toolcalling_agent"}


class _Ends:
    """Ends after its last step instead of asking the model for one more answer, unless the settings want that."""

    name: str | None
    max_steps: int

    def __init__(self, *, final_answer_at_max_steps: bool, **kwargs: Any) -> None:
        self._final_answer_at_max_steps = final_answer_at_max_steps
        super().__init__(**kwargs)

    @functools.cached_property
    def _rendered_prompt(self) -> str:
        return str(super().initialize_system_prompt())  # type: ignore[misc]

    def __call__(self, task: str, additional_args: dict[str, Any] | None = None) -> str:
        """A managed agent's report. The arguments come from model-written code; smolagents' own method would pass
        on every argument of `run`, `max_steps` among them. Raises TypeError."""
        if not isinstance(task, str):
            raise TypeError(f"the task must be text, not {type(task).__name__}")
        if not isinstance(additional_args, dict | None):
            raise TypeError(f"additional_args must be a dict, not {type(additional_args).__name__}")
        return str(super().__call__(task, additional_args=additional_args))  # type: ignore[misc]

    def initialize_system_prompt(self) -> str:
        """Rendered once: smolagents asks for it several times in a run, and nothing that it shows changes."""
        return self._rendered_prompt

    def provide_final_answer(self, task: str) -> ChatMessage:
        """smolagents' extra completion, if the settings want it. Otherwise a managed agent reports that it has no
        answer, and the main agent raises StepsUsedUp."""
        if self._final_answer_at_max_steps:
            return super().provide_final_answer(task)  # type: ignore[misc]
        if self.name is None:
            raise StepsUsedUp
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"No answer within {self.max_steps} steps.")


class SandboxCodeAgent(_Ends, CodeAgent):
    """Acts by code."""


class SandboxToolCallingAgent(_Ends, ToolCallingAgent):
    """Acts by tool calls: those of a completion that come as data, else one that is JSON in its text."""

    def __init__(self, *, executor: WorkerExecutor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.python_executor = executor  # `run` sends it variables and tools at its start, as for a code agent
        self._results: dict[str, str] = {}  # by the call's id, of calls that came as data

    def process_tool_calls(
        self, chat_message: ChatMessage, memory_step: ActionStep
    ) -> Generator[ToolCall | ToolOutput]:
        """Carries the calls out. Raises AgentError.

        Calls as data run one after another, as there is one code worker, and all of them do: each needs a result
        in the conversation, whatever becomes of the others.
        """
        if not chat_message.raw:
            yield from super().process_tool_calls(chat_message, memory_step)
            return
        outputs: list[ToolOutput] = []
        failed: AgentError | None = None
        for call in chat_message.tool_calls or ():
            alone = replace(chat_message, tool_calls=[call])
            try:
                *_, output = super().process_tool_calls(alone, ActionStep(memory_step.step_number, Timing(0.0)))
            except AgentError as error:
                failed = failed or error
                self._results[call.id] = _message_of(error)
            else:
                outputs.append(output)
                if not output.is_final_answer:  # an answer has no result, but an error if it is refused
                    self._results[call.id] = output.observation
        calls = chat_message.tool_calls or ()
        memory_step.tool_calls = [ToolCall(c.function.name, c.function.arguments, c.id) for c in calls]
        memory_step.observations = "\n".join(output.observation for output in outputs) or None
        if len(calls) > 1:
            self.python_executor.answered = False  # smolagents refuses an answer beside other calls
        if failed is not None:
            raise failed
        yield from outputs

    def write_memory_to_messages(self, summary_mode: bool = False) -> list[ChatMessage]:
        """As smolagents' own, with calls and results as data where the calls came so."""
        if summary_mode:
            return list(super().write_memory_to_messages(summary_mode))
        messages = self.memory.system_prompt.to_messages()
        for step in self.memory.steps:
            messages += self._exchange(step) or step.to_messages()
        return list(messages)

    def _exchange(self, step: MemoryStep) -> list[ChatMessage]:
        """A step as its completion with calls and the result of each. Empty: its completion had none as data."""
        reply = step.model_output_message if isinstance(step, ActionStep) else None
        if reply is None or not reply.raw:
            return []
        failed = "" if step.error is None else _message_of(step.error)
        results = [(call, self._results.get(call.id, failed)) for call in reply.raw]
        return [reply, *(ChatMessage(MessageRole.TOOL_RESPONSE, text, raw=(call,)) for call, text in results)]


def _message_of(error: AgentError) -> str:
    """An error in the words in which smolagents shows it to the model."""
    (message,) = ActionStep(0, Timing(0.0), error=error).to_messages()
    return str(message.content[0]["text"])


class _Log(AgentLogger):
    """smolagents' log as plain text on stderr. Only what is shown is formatted: formatting took most of a step."""

    def __init__(self, verbosity: int) -> None:
        super().__init__(level=verbosity - 1)

    def log(self, *parts: Any, level: int | str = LogLevel.INFO, **kwargs: Any) -> None:
        if (LogLevel[level.upper()] if isinstance(level, str) else level) <= self.level:
            print(*parts, sep="\n", file=sys.stderr, flush=True)

    def log_markdown(
        self, content: str, title: str | None = None, level: Any = LogLevel.INFO, **kwargs: Any
    ) -> None:
        self.log_code(title or "", content, level)

    def log_code(self, title: str, content: str, level: Any = LogLevel.INFO) -> None:
        self.log(title, content, level=level)

    def log_rule(self, title: str, level: Any = LogLevel.INFO) -> None:
        self.log(title, level=level)

    def log_task(self, content: str, subtitle: str, title: str | None = None, level: Any = LogLevel.INFO) -> None:
        self.log("New run" + f" - {title}" * bool(title), content, subtitle, level=level)


class _Before(MemoryStep):
    """What was said before the first task."""

    def __init__(self, context: Sequence[Message], *, calls_as_data: bool) -> None:
        self._talk = before(context, None if calls_as_data else _action)

    def to_messages(self, summary_mode: bool = False) -> list[ChatMessage]:
        calls = {call.id: call for message in self._talk for call in message.calls}
        roles = {"user": MessageRole.USER, "assistant": MessageRole.ASSISTANT, "tool": MessageRole.TOOL_RESPONSE}
        return [
            ChatMessage(
                roles[one.role], one.content, raw=(calls[one.call_id],) if one.call_id else one.calls or None
            )
            for one in self._talk
        ]


def _action(call: Call) -> str:
    """As smolagents' prompts have calls in the text."""
    return f'Action:\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'


def build_agent(
    assignment: Assignment, complete: Complete, new_executor: NewExecutor, on_step: OnStep
) -> tuple[MultiStepAgent, WorkerExecutor]:
    """The main agent with those it manages, for one run, and the executor that receives its answer."""
    settings = assignment.agent
    own_specs = (tool.spec for tool in assignment.sandbox_tools)
    tools = {spec.name: spec for spec in (*FILE_TOOLS, *own_specs, *assignment.host_tools)}

    def build(
        kind: AgentKind, name: str, tools: Mapping[str, ToolSpec], **own: Any
    ) -> tuple[MultiStepAgent, WorkerExecutor]:
        executor = new_executor(kind, name, tools)
        own |= {
            "name": name or None,
            "model": OrchestratorModel(complete, name, calls_as_data=settings.calls_as_data),
            "executor": executor,
            "prompt_templates": _templates(settings, kind),
            "final_answer_at_max_steps": settings.final_answer_at_max_steps,
            "step_callbacks": {ActionStep: lambda step: on_step(_report(step, name))},
            "logger": _Log(settings.verbosity),
        }
        if kind == "tool_calling":
            tools_called = called_tools(tools, executor, settings.authorized_imports)
            return SandboxToolCallingAgent(tools=tools_called, **own), executor
        code_agent = SandboxCodeAgent(
            tools=[CalledTool(in_words(spec)) for spec in tools.values()],
            additional_authorized_imports=list(settings.authorized_imports),
            code_block_tags=settings.code_tags,
            max_print_outputs_length=settings.max_output_chars,
            **own,
        )
        return code_agent, executor

    managed = []
    for member in settings.managed_agents:
        theirs = {name: tools[name] for name in member.tools}
        kind = agent_kind(member.kind)
        agent, _ = build(kind, member.name, theirs, description=member.description, max_steps=member.max_steps)
        managed.append(agent)
    agent, executor = build(
        settings.kind,
        "",
        tools,
        instructions=settings.instructions,
        max_steps=settings.max_steps,
        planning_interval=settings.planning_interval,
        managed_agents=managed,
    )
    if assignment.context:
        agent.memory.steps.append(_Before(assignment.context, calls_as_data=settings.calls_as_data))
    executor.team = {agent.name: agent for agent in managed}
    return agent, executor


def _template(source: str, undefined: Any) -> Template:
    """`Template(source, undefined=undefined)` of jinja2, compiled once, or taken from the image."""
    return _compiled(source, undefined)  # one key in its cache, however this was called


@functools.cache
def _compiled(source: str, undefined: Any) -> Template:
    environment = Environment(undefined=undefined)  # noqa: S701 - no HTML
    code = remembered(("template", source), lambda: environment.compile(source))
    return Template.from_code(environment, code, environment.make_globals(None))


# smolagents compiles its templates anew for every agent: most of the time from assignment to first completion.
smolagents.agents.Template = _template


def _templates(settings: AgentSettings, kind: AgentKind) -> Any:
    """smolagents' templates; for agents of the main agent's kind, the settings' templates replace some of them."""
    templates = {name: dict(t) if isinstance(t, dict) else t for name, t in _own_templates(kind).items()}
    if kind == "tool_calling" and settings.calls_as_data:
        templates["system_prompt"] = DATA_PROMPT
    if kind == settings.kind and settings.prompt_templates is not None:
        for name, template in settings.prompt_templates.items():
            templates[name] = {**templates[name], **template} if isinstance(template, dict) else template
    return templates


@functools.cache
def _own_templates(kind: AgentKind) -> Any:
    """smolagents' templates for this kind of agent, read once."""
    source = Path(smolagents.agents.__file__).with_name("prompts") / f"{_TEMPLATES[kind]}.json"
    if source.exists():  # the image holds them as JSON too
        return json.loads(source.read_text("utf-8"))
    import yaml

    return yaml.safe_load(source.with_suffix(".yaml").read_text("utf-8"))


def prepare() -> None:
    """Compiles what nearly every agent needs; pid 1 does so for all its children."""
    _template(_own_templates("code")["system_prompt"], StrictUndefined)


def _report(step: ActionStep, agent: str) -> StepReport:
    calls = step.tool_calls or []
    return StepReport(
        step_number=step.step_number,
        model_output=step.model_output if isinstance(step.model_output, str) else "",
        code=step.code_action or "\n".join(f"{call.name}(**{call.arguments!r})" for call in calls),
        observations=step.observations or "",
        error_type=type(step.error).__name__ if step.error else "",
        error=str(step.error) if step.error else "",
        is_final_answer=step.is_final_answer,
        duration_s=step.timing.duration or 0.0,
        agent=agent,
    )
