"""smolagents' PythonExecutor over the code worker: what happens in a step becomes an observation.

smolagents' contract: `send_tools`, `send_variables`, a call that returns a CodeOutput or raises an
ordinary exception whose text is the observation, and `state["_print_outputs"]`, the only way in which
prints before an exception reach the model.
"""

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from smolagents.local_python_executor import CodeOutput, PythonExecutor

from sandbox.errors import (
    CodeError,
    EpisodeCrashed,
    MemoryUsedUp,
    StepTimeout,
    ToolFailure,
    WorkerDied,
    WorkerLost,
    WorkerMisbehaved,
    WorkerReplaced,
)
from sandbox.runner.worker_link import WorkerLink
from sandbox.texts import ANSWER_CHARS, clip
from sandbox.types import AgentKind, AgentSettings, SandboxTool, ToolSpec
from sandbox.worker.tools import FILE_TOOLS

MAX_MEMORY_KILLS = 3  # in consecutive steps; then the episode is over
MAX_VALUE_CHARS = 20_000  # smolagents cuts the last value there, and would cut our truncation note too
MAX_OBSERVATION_BYTES = 1 << 20
MAX_ERROR_BYTES = 2000  # of an error that may quote arguments or a tool's message
_SETUP_LIMIT_S = 30.0
_JSON_TYPES = ("array", "object", "integer", "number", "boolean")
_MEMBER_INPUTS: Mapping[str, Mapping[str, Any]] = {"task": {}, "additional_args": {"nullable": True}}
_GONE = "A fresh Python process takes its place: all variables, imports and background processes are gone."

CallTool = Callable[[str, str], str]  # name, arguments as JSON -> output; raises ToolFailure


@dataclass(frozen=True, slots=True)
class Reach:
    """What one agent's code finds in the worker. `space`: the agent's name, for variables of its own.

    Only code agents end by `final_answer(...)` in their code; others call it as a tool.
    """

    host_tools: tuple[ToolSpec, ...] = ()
    sandbox_tools: tuple[SandboxTool, ...] = ()
    files: tuple[str, ...] = tuple(spec.name for spec in FILE_TOOLS)
    space: str = ""
    kind: AgentKind = "code"


class WorkerExecutor(PythonExecutor):
    """Runs code steps. `answer`: what `final_answer` got, once `answered`. `team`: managed agents by name."""

    def __init__(
        self,
        link: WorkerLink,
        settings: AgentSettings,
        reach: Reach,
        call_tool: CallTool,
        memory_kills: Callable[[], int | None],
    ) -> None:
        self.state: dict[str, Any] = {"_print_outputs": ""}
        self.answered = False
        self.answer: bytes | None = None
        self._link = link
        self._settings = settings
        self.team: Mapping[str, Callable[..., object]] = {}
        self._reach = reach
        self._call_tool = call_tool
        self._memory_kills = memory_kills
        self._kills_seen = memory_kills()
        self._killed_in_a_row = 0
        self._variables: dict[str, Any] = {}
        self._step = 0
        link.limit_output(settings.max_output_chars)

    def send_tools(self, tools: Mapping[str, Any]) -> None:
        """Does nothing: the worker gets its tools from the assignment; smolagents' objects are for the prompt."""

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        """Called at the start of each run. A worker that replaces another gets all variables again.

        Raises EpisodeCrashed; for a managed agent WorkerLost, as its caller's code may have broken the worker.
        """
        self._variables.update(variables)
        if self._reach.space:
            self._set_up()
        else:
            self._set_up_fresh()

    def __call__(self, code_action: str) -> CodeOutput:
        """Runs one step. Raises CodeError, an observation, and MemoryUsedUp."""
        return self._act({"code": code_action})

    def call(self, tool: str, arguments: Mapping[str, Any]) -> CodeOutput:
        """Runs a step that calls one tool, whatever model-written code has made of its name. Raises as a step."""
        return self._act({"tool": tool, "arguments": arguments})

    def _act(self, action: Mapping[str, Any]) -> CodeOutput:
        self._step += 1
        self.state["_print_outputs"] = ""
        try:
            done = self._run(action)
        except WorkerLost as lost:
            self._replace_after(lost)
        self._killed_in_a_row = 0
        printed = self.state["_print_outputs"] = self._printed()
        if done["answered"]:
            self.accept(done["answer"])
            return CodeOutput(output=_sayable(done["answer"] or ""), logs=printed, is_final_answer=True)
        if done["error"] is not None:
            raise CodeError(_sayable(done["error"]))
        value = done["value"]
        return CodeOutput(output=None if value is None else _sayable(value), logs=printed, is_final_answer=False)

    def accept(self, answer: str | None) -> None:
        """Takes the agent's final answer as text; None: `final_answer(None)`."""
        self.answered = True
        self.answer = None if answer is None else answer.encode("utf-8", "surrogatepass")[:ANSWER_CHARS]

    def _run(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the step's last frame. Serves the tools that it calls; their time is not the step's."""
        deadline = time.monotonic() + self._settings.step_timeout_s
        step = {"kind": "step", "step": self._step, "space": self._reach.space, **action}
        self._link.send(step, deadline)
        while True:
            frame = self._link.receive(deadline)
            if frame.get("step") != self._step:
                raise WorkerMisbehaved("it sent a frame of another step")
            if frame.get("kind") == "done":
                return _checked_done(frame)
            started = time.monotonic()
            reply = self._serve_tool(frame)
            deadline += time.monotonic() - started
            self._link.send(reply, deadline)

    def _serve_tool(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments, number = frame.get("name"), frame.get("arguments"), frame.get("call")
        if frame.get("kind") != "call" or not isinstance(number, int):
            raise WorkerMisbehaved("it sent an invalid frame")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise WorkerMisbehaved("it sent an invalid frame")
        output: str | None = None
        error: str | None = None
        try:
            if name in self.team:
                output = self._ask(self.team[name], arguments)
            elif name in {tool.name for tool in self._reach.host_tools}:
                output = self._call_tool(name, arguments)
            else:
                raise ToolFailure(f"there is no tool {name[:80]!r}")
        except ToolFailure as failure:
            error = str(failure)
        return {"kind": "reply", "call": number, "output": output, "error": error}

    def _ask(self, member: Callable[..., object], arguments: str) -> str:
        """A managed agent's report. Its steps run in the same worker, in the middle of the caller's step.

        Raises ToolFailure; WorkerLost, which is WorkerReplaced when one of its steps lost the worker.
        """
        self._link.drain_output()
        printed, worker = self._link.take_output(), self._link.number
        try:
            fields = json.loads(arguments)
            if not isinstance(fields, dict):
                raise TypeError("the arguments are not a JSON object")
            report = str(member(**fields))
        except WorkerLost:
            raise
        except Exception as error:  # smolagents may fail in any way on model-written arguments
            raise ToolFailure(clip(f"{type(error).__name__}: {error}", MAX_ERROR_BYTES)) from error
        finally:
            self._link.give_back_output(printed)
        if self._link.number != worker:
            raise WorkerReplaced
        return _sayable(report)

    def _replace_after(self, lost: WorkerLost) -> NoReturn:
        """Starts a fresh worker. Raises CodeError, which tells how the old one ended, or MemoryUsedUp."""
        killed = isinstance(lost, WorkerDied) and self._was_memory(lost.status)
        self._killed_in_a_row = self._killed_in_a_row + 1 if killed else 0
        self.state["_print_outputs"] = self._printed()
        self._link.replace()
        if self._killed_in_a_row >= MAX_MEMORY_KILLS:
            raise MemoryUsedUp
        self._set_up_fresh()
        raise CodeError(f"{self._reason(lost, killed)} {_GONE}") from None

    def _reason(self, lost: WorkerLost, killed_for_memory: bool) -> str:
        match lost:
            case WorkerReplaced():
                return "Code of the agent that was called broke the Python process both run in."
            case StepTimeout():
                return f"The code ran longer than {self._settings.step_timeout_s:g} seconds and was stopped."
            case WorkerDied() if killed_for_memory:
                return "The code was killed because it used too much memory."
            case WorkerDied(status=status) if status < 0:
                return f"The code's Python process was killed by signal {_signal_name(-status)}."
            case WorkerDied(status=status):
                return f"The code's Python process ended with exit code {status}."
        return f"The code broke the Python process it runs in: {lost}."

    def _was_memory(self, status: int) -> bool:
        """Whether the worker was killed for memory: by the kernel's count, or the signal where it has none."""
        before, self._kills_seen = self._kills_seen, self._memory_kills()
        if status != -signal.SIGKILL:
            return False
        return before is None or self._kills_seen is None or self._kills_seen > before

    def _set_up_fresh(self) -> None:
        """No model-written code has run in the worker yet: a failure is ours, a sandbox tool's or the task's.
        Raises EpisodeCrashed."""
        try:
            self._link.settle()
            self._set_up()
        except WorkerLost as lost:
            raise EpisodeCrashed(f"a fresh code worker cannot be used: {lost}") from lost

    def _set_up(self) -> None:
        """Raises WorkerLost."""
        reach, deadline = self._reach, time.monotonic() + _SETUP_LIMIT_S
        setup = {
            "kind": "setup",
            "space": reach.space,
            "max_chars": min(self._settings.max_output_chars, MAX_VALUE_CHARS),
            "answers": reach.kind == "code",
            "files": reach.files,
            "sandbox_tools": [
                {"name": tool.spec.name, "module": tool.module, "source": tool.source}
                for tool in reach.sandbox_tools
            ],
            "tools": [
                *(_callable(tool.name, tool.inputs, tool.output_type) for tool in reach.host_tools),
                *(_callable(name, _MEMBER_INPUTS, "string") for name in self.team),
            ],
            "variables": self._variables,
        }
        self._link.send(setup, deadline)
        if reach.sandbox_tools:  # the operator's code may not work in this image
            problem = self._link.receive(deadline).get("error")
            if problem is not None:
                problem = clip(str(problem), MAX_ERROR_BYTES)
                raise WorkerMisbehaved(f"a sandbox tool does not work: {problem}")

    def _printed(self) -> str:
        self._link.drain_output()
        return self._link.take_output()


def _callable(name: str, inputs: Mapping[str, Mapping[str, Any]], output_type: str) -> dict[str, Any]:
    """What the worker needs to know of a tool that the runner serves."""
    return {
        "name": name,
        "required": [name for name, shape in inputs.items() if not shape.get("nullable")],
        "optional": [name for name, shape in inputs.items() if shape.get("nullable")],
        "json": output_type in _JSON_TYPES,
    }


def _checked_done(frame: dict[str, Any]) -> dict[str, Any]:
    texts = [frame.get("value"), frame.get("error"), frame.get("answer")]
    readable = all(text is None or isinstance(text, str) for text in texts)
    if not readable or not isinstance(frame.get("answered"), bool):
        raise WorkerMisbehaved("it sent an invalid frame")
    return {name: frame.get(name) for name in ("value", "error", "answer", "answered")}


def _sayable(text: str) -> str:
    """Text that can be sent on: encodable, and cut to more than an honest worker sends."""
    return clip(text, MAX_OBSERVATION_BYTES)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
