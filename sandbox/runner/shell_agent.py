"""The shell agent: the model calls one tool, `bash`, until it answers without a call.

Where calls are data (`AgentSettings.calls_as_data`) the chat template shows the tool, and its results are messages
of their own. Elsewhere a command is a fenced block in the text, and what it printed is the user's next message.
"""

import json
import re
import signal
import time
from collections.abc import Callable

from sandbox.errors import EpisodeCrashed, StepTimeout, WorkerLost, WorkerMisbehaved
from sandbox.runner.context import before, say
from sandbox.runner.model import Complete
from sandbox.runner.worker_link import WorkerLink
from sandbox.texts import ANSWER_CHARS
from sandbox.types import AgentSettings, Assignment, Call, Completion, Message, Result, StepReport

_SYSTEM = """\
You solve the user's task at the command line of a Linux machine without a network. {how}

- Each command runs in a new {shell}. The working directory, at first {cwd}, and exported variables stay for the \
next one.
- A command is killed after {limit:g} seconds. Run what takes longer, or never ends, in the background, with its \
output in a file.
- Commands get no input.
- Of a long output you see the beginning and the end, {chars} characters in all.
- You have {steps} steps: each of your messages is one.

Look at what a command printed before you rely on it. When the task is done, write a message without a {command}: \
it ends your work. If the task asks for an answer, that message is the answer and nothing else."""
_CALLS = "Run commands by calling the tool bash."
_FENCED = """\
Write one command in each message, in a block like this:

```bash
ls -l
```

Then wait: its output is the next message."""
_BLOCK_BEGINS = re.compile(r"^[ \t]*```(?:bash|sh|shell)[ \t]*$", re.MULTILINE)
_BLOCK = re.compile(rf"{_BLOCK_BEGINS.pattern}\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command and returns what it printed and its exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, of one or more lines."}},
            "required": ["command"],
        },
    },
}
# What the families of models begin a call with; and a call as JSON in the text, as small models write it.
# A message with it, and without a call, is no answer.
_CALL_BEGINS = re.compile(
    r"<tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]|<\uff5ctool|\"name\"\s*:\s*\"bash\""
)
_UNREADABLE = "[no command was run: {what} cannot be read]"
_CUT = "[your message was cut off: it was too long; no command was run]"
_LAST = "You have used up your steps, and no more commands are run. Write your answer."
_CANNOT_BE_PRINTED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]+")
_MAX_COMMAND_BYTES = 128 * 1024 - 1  # Linux takes no longer argument
_PROBLEM_CHARS = 200
_SETUP_LIMIT_S = 30.0
_GRACE_S = 10.0  # how long the worker may take, behind a command's limit, to kill it and to say so


class Commands:
    """Runs commands in the code worker; whatever becomes of them is an observation."""

    def __init__(self, link: WorkerLink, settings: AgentSettings, memory_kills: Callable[[], int | None]) -> None:
        self._link = link
        self._limit_s = settings.step_timeout_s
        self._number = 0
        self._memory_kills = memory_kills
        link.limit_output(settings.max_output_chars)

    def open(self) -> str | None:
        """The path of the shell in a fresh worker; None: the image has none. Raises EpisodeCrashed."""
        try:
            self._link.settle()
            deadline = time.monotonic() + _SETUP_LIMIT_S
            self._link.send({"kind": "shell"}, deadline)
            shell = self._link.receive(deadline).get("shell")
        except WorkerLost as lost:
            raise EpisodeCrashed(f"a fresh code worker cannot be used: {lost}") from lost
        return shell if isinstance(shell, str) else None

    def run(self, command: str) -> str:
        """What the command printed, and how it ended. Raises EpisodeCrashed."""
        if "\0" in command or len(command.encode("utf-8", "replace")) > _MAX_COMMAND_BYTES:
            return "[no command was run: it holds a NUL character, or more than 128 KiB]"
        killed_before, lost = self._memory_kills(), False
        try:
            end = self._end(command)
        except WorkerLost as error:
            is_late = isinstance(error, StepTimeout)
            lost, end = True, "the command ran too long" if is_late else f"what runs commands broke: {error}"
        self._link.drain_output()
        printed = printable(self._link.take_output())
        if self._memory_kills() != killed_before:
            end += "; processes were killed because memory ran out"
        if lost:
            self._link.replace()
            self.open()
            end += "; all processes were ended, and the working directory and variables are as at the beginning"
        between = "\n" if printed and not printed.endswith("\n") else ""
        return f"{printed}{between}[{end}]"

    def _end(self, command: str) -> str:
        """Raises WorkerLost: the worker was killed or stopped, or can start no process."""
        deadline = time.monotonic() + self._limit_s + _GRACE_S
        self._number += 1
        order = {"kind": "command", "number": self._number, "command": command, "limit_s": self._limit_s}
        self._link.send(order, deadline)
        done = self._link.receive(deadline)
        if done.get("number") != self._number:
            raise WorkerMisbehaved("it sent a frame of another command")
        if (problem := done.get("problem")) is not None:
            raise WorkerMisbehaved(f"no process can be started: {str(problem)[:_PROBLEM_CHARS]}")
        status = done.get("status")
        if not isinstance(status, int):
            return f"killed after {self._limit_s:g} seconds, with what it had started"
        return f"exit code {status}" if status >= 0 else f"killed by {_signal_name(-status)}"


class ShellAgent:
    """One conversation, of one instruction after the other. `cwd`: where its commands begin."""

    def __init__(
        self,
        assignment: Assignment,
        cwd: str,
        link: WorkerLink,
        complete: Complete,
        *,
        on_step: Callable[[StepReport], None],
        memory_kills: Callable[[], int | None],
    ) -> None:
        """Raises EpisodeCrashed."""
        self._settings = settings = assignment.agent
        self._complete, self._on_step = complete, on_step
        self._commands = Commands(link, settings, memory_kills)
        self._shell = self._commands.open()
        self._tools = (_TOOL,) if settings.calls_as_data else ()
        self._talk = [Message("system", _system(settings, self._shell or "", cwd))]
        self._talk += before(assignment.context, None if settings.calls_as_data else _fenced)
        self._number = 0

    def solve(self, task: str) -> Result:
        """Until it answers, or its steps are used up. Raises EpisodeEnd."""
        settings, talk = self._settings, self._talk
        if self._shell is None:
            return Result("no_answer", detail="the image has neither bash nor sh, and env.agent is shell")
        say(talk, task)
        for _ in range(settings.max_steps):
            started = time.monotonic()
            self._number += 1
            said = self._complete("action", tuple(talk), tools=self._tools)
            talk.append(Message("assistant", said.text, said.calls))
            found, unreadable = _found(said, settings.calls_as_data)
            seen = [self._commands.run(command) if command is not None else unreadable for command in found]
            if said.calls:
                talk += [
                    Message("tool", text, call_id=call.id) for call, text in zip(said.calls, seen, strict=True)
                ]
            elif seen:
                talk.append(Message("user", "\n\n".join(seen)))
            shown = "\n".join(command for command in found if command is not None)
            took = time.monotonic() - started
            self._on_step(StepReport(self._number, said.text, shown, "\n\n".join(seen), "", "", not seen, took))
            if not seen:
                return _answer(said)
        if not settings.final_answer_at_max_steps:
            return Result("max_steps")
        say(talk, _LAST)
        said = self._complete("final", tuple(talk), tools=self._tools)
        talk.append(Message("assistant", said.text, said.calls))
        return _answer(said)


def printable(text: str) -> str:
    """One line where a terminal would print one over another; what it could not print becomes U+FFFD."""
    return _CANNOT_BE_PRINTED.sub("\ufffd", re.sub(r"\r+\n?", "\n", text))


def _system(settings: AgentSettings, shell: str, cwd: str) -> str:
    text = _SYSTEM.format(
        how=_CALLS if settings.calls_as_data else _FENCED,
        command="call" if settings.calls_as_data else "bash block",
        shell=shell.rpartition("/")[2],
        cwd=cwd,
        limit=settings.step_timeout_s,
        chars=settings.max_output_chars,
        steps=settings.max_steps,
    )
    return f"{text}\n\n{settings.instructions}" if settings.instructions else text


def _found(said: Completion, calls_as_data: bool) -> tuple[list[str | None], str]:
    """(the commands of a message, what to say of one that is None: it cannot be read). No commands: an answer."""
    if calls_as_data:
        found = [_command(call) for call in said.calls]
        begun, what = _CALL_BEGINS, "the call" if not found else "bash has one argument, command, a text: this one"
    else:
        found = list(_BLOCK.findall(said.text))
        begun, what = _BLOCK_BEGINS, "the block has no end and"
    if found or not (said.finish_reason == "length" or begun.search(said.text)):
        return found, _UNREADABLE.format(what=what)
    return [None], _CUT if said.finish_reason == "length" else _UNREADABLE.format(what=what)


def _command(call: Call) -> str | None:
    """The command of a call; None: it has none."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    return command if isinstance(command, str) else None


def _fenced(call: Call) -> str:
    """A call of the conversation before, as this agent writes one."""
    command = _command(call)
    return f"```bash\n{command}\n```" if command is not None else f"{call.name}({call.arguments})"


def _answer(said: Completion) -> Result:
    return Result("final_answer", said.text.strip().encode("utf-8", "surrogatepass")[:ANSWER_CHARS])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
