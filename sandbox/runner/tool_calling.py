"""Tools of smolagents' ToolCallingAgent over the code worker: each call runs there, as a step of its own.

`python_interpreter`, file tools, sandbox tools and host tools are called in the worker, with its rights; only
`final_answer` and managed agents run in the runner.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from smolagents.local_python_executor import CodeOutput
from smolagents.tools import Tool

from sandbox.errors import CodeError
from sandbox.runner.executor import WorkerExecutor
from sandbox.texts import answer_text
from sandbox.types import ToolSpec

PYTHON_TOOL = "python_interpreter"
# For calls as data: smolagents' own system prompt without its list of tools, which the chat template prints, and
# without its examples of calls as JSON in the text, which would teach another format than the model's.
DATA_PROMPT = """\
You are an expert assistant who can solve any task using tool calls. You will be given a task to solve as best \
you can.
To do so, you have been given access to some tools.

The tool call you write is an action: after the tool is executed, you will get the result of the tool call.
This can repeat N times, you should take several steps when needed.
You can use the result of the previous action as input for the next action.

To provide the final answer to the task, call the tool "final_answer". It is the only way to complete the task, \
else you will be stuck on a loop.
{%- if managed_agents and managed_agents.values() | list %}

You can also give tasks to team members.
Calling a team member works as calling a tool: provide the task description as the 'task' argument. Since this \
team member is a real human, be as detailed and verbose as necessary in your task description.
You can also include any relevant variables or context using the 'additional_args' argument.
Here is a list of the team members that you can call:
{%- for agent in managed_agents.values() %}
- {{ agent.name }}: {{ agent.description }}
{%- endfor %}
{%- endif %}
{%- if custom_instructions %}

{{custom_instructions}}
{%- endif %}

Here are the rules you should always follow to solve your task:
1. ALWAYS provide a tool call, else you will fail.
2. Always use the right arguments for the tools. Never use variable names as the action arguments, use the value \
instead.
3. Call a tool only when needed: try to solve the task yourself. If no tool call is needed, call final_answer to \
return your answer, and no other tool beside it.
4. Never re-do a tool call that you previously did with the exact same parameters.

Now Begin!"""
_TOLD = frozenset({"type", "description", "nullable"})  # of an argument
_ANSWER = {"answer": {"type": "any", "description": "The final answer to the problem."}}


class CalledTool(Tool):
    """A tool as smolagents wants it. Its arguments stay as the model wrote them."""

    skip_forward_signature_validation = True

    def __init__(self, spec: ToolSpec) -> None:
        self.name = spec.name
        self.description = spec.description
        self.inputs = {name: dict(shape) for name, shape in spec.inputs.items()}
        self.output_type = spec.output_type
        super().__init__()

    def __call__(self, *args: Any, sanitize_inputs_outputs: bool = False, **kwargs: Any) -> Any:
        """Takes arguments by name, as one dict, or without names, as some calls in smolagents' prompt do."""
        if len(args) == 1 and not kwargs and isinstance(args[0], dict) and set(args[0]) <= set(self.inputs):
            return self.forward(**args[0])
        return self.forward(**dict(zip(self.inputs, args, strict=False)), **kwargs)

    def forward(self, **arguments: Any) -> str:
        """Not implemented: this tool is only shown in a prompt."""
        raise NotImplementedError


def in_words(spec: ToolSpec) -> ToolSpec:
    """The tool for a prompt that shows one type and one text per argument: what a schema says besides is in the
    text."""
    return replace(spec, inputs={name: _in_words(shape) for name, shape in spec.inputs.items()})


def _in_words(shape: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in shape.items() if key in _TOLD}
    if more := {key: value for key, value in shape.items() if key not in _TOLD}:
        told["description"] = f"{shape['description']} JSON schema: {json.dumps(more, ensure_ascii=False)}"
    return told


class WorkerTool(CalledTool):
    """Runs in the code worker."""

    def __init__(self, spec: ToolSpec, executor: WorkerExecutor) -> None:
        super().__init__(spec)
        self._executor = executor

    def forward(self, **arguments: Any) -> str:
        """What the call printed and returned, as text. Raises CodeError."""
        printed, value = _run(self._executor, lambda: self._executor.call(self.name, arguments))
        return f"{printed}{value}"


class PythonTool(WorkerTool):
    """`python_interpreter`: model-written code in the worker, its variables kept."""

    def __init__(self, executor: WorkerExecutor, authorized_imports: tuple[str, ...]) -> None:
        anything = "*" in authorized_imports
        packages = "any package" if anything else f"these packages: {', '.join(authorized_imports)}"
        super().__init__(
            ToolSpec(
                PYTHON_TOOL,
                "Runs Python code and returns what it printed and the value of its last line. Variables "
                f"stay for later calls. It can import {packages}.",
                {"code": {"type": "string", "description": "The code to run."}},
                "string",
            ),
            executor,
        )

    def forward(self, **arguments: Any) -> str:
        """The result in the form of smolagents' own tool of this name. Raises CodeError."""
        printed, value = _run(self._executor, lambda: self._executor(arguments["code"]))
        return f"Stdout:\n{printed}\nOutput: {value}"


class AnswerTool(CalledTool):
    """`final_answer`: the only tool that ends the run."""

    def __init__(self, executor: WorkerExecutor) -> None:
        super().__init__(
            ToolSpec("final_answer", "Provides the final answer to the given problem.", _ANSWER, "any")
        )
        self._executor = executor

    def forward(self, **arguments: Any) -> Any:
        """Makes the answer text in the runner, which is safe: it is plain JSON data."""
        answer = arguments["answer"]
        self._executor.accept(answer_text(answer))
        return answer


def called_tools(
    specs: Mapping[str, ToolSpec], executor: WorkerExecutor, authorized_imports: tuple[str, ...]
) -> list[Tool]:
    """The tools of a tool-calling agent, without its managed agents."""
    return [
        PythonTool(executor, authorized_imports),
        *(WorkerTool(spec, executor) for spec in specs.values()),
        AnswerTool(executor),
    ]


def _run(executor: WorkerExecutor, step: Callable[[], CodeOutput]) -> tuple[str, str]:
    """(printed, value) of a step. Raises CodeError, which includes what was printed before."""
    try:
        output = step()
    except CodeError as error:
        printed = executor.state["_print_outputs"]
        raise CodeError(f"{printed}\n{error}" if printed else str(error)) from None
    return output.logs, str(output.output)
