"""The code worker: runs model-written code as plain CPython, one step at a time, and keeps its variables.

It is forked from pid 1 and knows of the rollout only what frames tell it. Steps arrive as frames on one
pipe, their results leave as frames on another. What the code prints goes to the file descriptors 1 and 2,
and the runner collects it. A frame is a big-endian length of four bytes and that much JSON; frames that
belong to a step hold its number. The module that an agent's steps share is the real `__main__`, so classes
defined in it can be pickled.

The code shares this process and may replace anything in it. So this module looks builtins up in a
copy of its own, keeps references to the system calls it needs, and encodes with the C half of `json` alone.
Code that breaks the harness all the same only loses its worker, which the runner replaces.
"""

import builtins
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder, c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any, NoReturn

from sandbox.texts import answer_text, value_text
from sandbox.worker.program import Program
from sandbox.worker.shell import Shell
from sandbox.worker.steps import StepRunner
from sandbox.worker.streams import Streams, print_
from sandbox.worker.tools import FILE_FUNCTIONS
from sandbox.worker.tracebacks import describe_error

globals()["__builtins__"] = dict(vars(builtins))

COMMANDS_FD = 3
FRAMES_FD = 4
EXIT_BROKEN = 70  # of a worker whose pipes are gone or whose harness is broken
_READ_BYTES = 64 * 1024
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM)

_os_read, _os_write, _getpid, _exit = os.read, os.write, os.getpid, os._exit
_setitimer, _ITIMER_REAL = signal.setitimer, signal.ITIMER_REAL
_encode = c_make_encoder(None, JSONEncoder().default, encode_basestring_ascii, None, ":", ",", False, False, False)
_decode = JSONDecoder().scan_once  # type: ignore[attr-defined]


class FinalAnswer(BaseException):
    """Ends the step in which `final_answer` was called."""


class ToolError(RuntimeError):
    """A host tool or a managed agent failed, or was called in a way that cannot work."""


ToolError.__module__ = "builtins"  # so that tracebacks show its bare name


class _Space:
    """One agent's variables, tools and final answer."""

    def __init__(self) -> None:
        self.main = ModuleType("__main__")
        self.main.__dict__["__builtins__"] = builtins
        self.steps = StepRunner(self.main)
        self.tools: dict[str, Callable[..., Any]] = {}
        self.answered = False
        self.answer: str | None = None

    def put_back(self) -> list[str]:
        """Gives each tool, and `print`, its name again. Returns the names that the code had used for something
        else, which it finds with an underscore behind."""
        names, used = self.main.__dict__, []
        for name in (*self.tools, "print"):
            tool = self.tools.get(name)
            if name in names and names[name] is not tool:
                used.append(name)
                names[f"{name}_"] = names.pop(name)
            if tool is not None:
                names[name] = tool
        return used


class Worker:
    """The harness around the steps of one worker process."""

    def __init__(self) -> None:
        self._pid = _getpid()
        self._step = 0
        self._running = False
        self._inbox = _Inbox()
        self._calling = threading.RLock()  # one tool call at a time, whichever thread makes it
        self._calls = 0
        self._max_chars = 0
        self._streams = Streams()
        self._spaces = {"": _Space()}  # by agent name; empty: the main agent
        sys.modules["__main__"] = self._spaces[""].main
        self._modules: dict[str, ModuleType] = {}
        self._program: Program | None = None
        self._shell: Shell | None = None
        self._variables: dict[str, str] = {}  # of the task

    def serve(self) -> None:
        """Runs steps until the runner closes its end."""
        while (message := self._inbox.receive()) is not None:
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "setup":
                self._setup(message)
            case "step" if not self._running:
                self._run(message, self._spaces[message["space"]])
            case "step":
                self._run_amid(message, self._spaces[message["space"]])
            case "preload":
                self._program = Program(message["environment"], message["modules"])
                _send({"kind": "ready"})
            case "place":
                self._variables = message["environment"]
                _send({"kind": "ready", "error": settle(message["cwd"], self._variables)})
            case "program":
                program, self._program = self._program or Program(message["environment"]), None
                status, answer, errors = program.run(message["program"], message["task"], self._variables)
                _send({"kind": "done", "status": status, "answer": answer, "errors": errors})
            case "shell":
                self._shell = Shell()
                _send({"kind": "ready", "shell": self._shell.program})
            case "command":
                _send({"kind": "done", "number": message["number"], **_carried_out(self._shell, message)})
            case "reply":
                pass  # the reply to a call that an exception, an alarm's for example, cut short

    def _setup(self, message: dict[str, Any]) -> None:
        self._max_chars = message["max_chars"]
        space = self._spaces.setdefault(message["space"], _Space())
        space.answered, space.answer = False, None
        space.tools = {name: FILE_FUNCTIONS[name] for name in message["files"]}
        if message["sandbox_tools"]:
            _send({"kind": "ready", "error": self._bring(message["sandbox_tools"], space.tools)})
        space.tools |= {tool["name"]: self._host_tool(**tool) for tool in message["tools"]}
        if message["answers"]:
            space.tools["final_answer"] = _final_answer(space)
        space.main.__dict__.update(message["variables"])

    def _bring(self, tools: list[dict[str, str]], names: dict[str, Callable[..., Any]]) -> str | None:
        """Runs the modules of sandbox tools and puts their functions into `names`; returns the first problem."""
        for tool in tools:
            try:
                function = getattr(self._module(tool["module"], tool["source"]), tool["name"])
                if not callable(function):
                    raise TypeError(f"{tool['name']} is not a function")
            except BaseException as error:  # running a module may raise anything
                return f"{tool['module']}: {type(error).__name__}: {error}"[:1000]
            names[tool["name"]] = function
        return None

    def _module(self, name: str, source: str) -> ModuleType:
        """Runs the module once, like an import."""
        if name not in self._modules:
            module = sys.modules[name] = ModuleType(name)
            exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
            self._modules[name] = module
        return self._modules[name]

    def _run_amid(self, message: dict[str, Any], space: _Space) -> None:
        """Runs a step of a managed agent that was called in the middle of another step."""
        outside = self._step, self._running, self._calling, sys.modules["__main__"], sys.stdout, sys.stderr
        sys.modules["__main__"] = space.main
        self._calling = threading.RLock()  # the outer step's lock is held by the call that waits
        try:
            self._run(message, space)
        finally:
            self._step, self._running, self._calling, sys.modules["__main__"], sys.stdout, sys.stderr = outside

    def _run(self, message: dict[str, Any], space: _Space) -> None:
        """Runs code, or one of the agent's tools whatever the code has made of its name."""
        self._step, self._running = message["step"], True
        self._streams.open()
        space.put_back()
        value: str | None = None
        error: str | None = None
        try:
            if "tool" in message:
                result = space.steps.call(space.tools[message["tool"]], message["arguments"])
            else:
                result = space.steps.run(self._step, message["code"])
            value = None if result is None else value_text(result, self._max_chars)
        except FinalAnswer:
            pass
        except SystemExit as raised:
            if _getpid() != self._pid:
                self._end_fork(raised.code if isinstance(raised.code, int) else raised.code is not None)
            error = describe_error(raised, self._max_chars)
        except BaseException as raised:  # KeyboardInterrupt and the like are failures of the step too
            error = describe_error(raised, self._max_chars)
        if _getpid() != self._pid:
            if error is not None:
                print_(error, file=sys.__stderr__)
            self._end_fork(error is not None)
        _setitimer(_ITIMER_REAL, 0)  # a timer that the code left running must not fire between steps
        self._streams.flush()
        for name in space.put_back():
            self._streams.say(
                f"Note: {name} is a tool's name. "
                f"The next step finds the tool there, and in {name}_ what this step called so.\n"
            )
        with self._calling:  # waits for a call that a thread of the step still makes
            self._running = False
            _send(
                {
                    "kind": "done",
                    "step": self._step,
                    "value": value,
                    "error": error,
                    "answered": space.answered,
                    "answer": space.answer,
                }
            )

    def _host_tool(self, name: str, required: list[str], optional: list[str], json: bool) -> Callable[..., Any]:
        """`json`: the tool's output is no text but a JSON value, and travels as JSON."""

        def call(*args: object, **kwargs: object) -> Any:
            output = self._call_host(name, _bind(name, required, optional, args, kwargs))
            return _decode(output, 0)[0] if json else output

        call.__name__ = call.__qualname__ = name
        call.__module__ = "__main__"
        return call

    def _call_host(self, name: str, arguments: dict[str, object]) -> str:
        try:
            encoded = "".join(_encode(arguments, 0))
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(
                f"{name}(): the arguments must be plain text, numbers, lists, dicts: {error}"
            ) from None
        if _getpid() != self._pid:
            raise ToolError(f"{name}() works only in the main process, not in a child of it")
        with self._calling:
            if not self._running:
                raise ToolError(f"{name}() works only while a step runs")
            self._calls += 1
            number = self._calls
            self._streams.flush()  # prints so far come before those of a managed agent
            _send({"kind": "call", "step": self._step, "call": number, "name": name, "arguments": encoded})
            reply = self._await_reply(number)
        if reply is None:
            _exit(EXIT_BROKEN)
        if reply["error"] is not None:
            raise ToolError(reply["error"])
        return str(reply["output"])

    def _await_reply(self, number: int) -> dict[str, Any] | None:
        """The reply to this call; None when the runner is gone. A called managed agent's steps run meanwhile."""
        while (message := self._inbox.receive()) is not None:
            if message["kind"] == "reply" and message["call"] == number:
                return message
            self._handle(message)
        return None

    def _end_fork(self, status: int) -> NoReturn:
        """Ends a child that the code forked and that has left the step's code, as a script would end."""
        try:
            self._streams.flush()
        finally:
            _exit(status & 0xFF)


def _carried_out(shell: Shell | None, message: dict[str, Any]) -> dict[str, Any]:
    """How a command ended, or why there is no process for it."""
    assert shell is not None
    try:
        return shell.run(message["command"], message["limit_s"])
    except OSError as error:
        return {"problem": error.strerror}


def settle(cwd: str, variables: dict[str, str]) -> str | None:
    """Goes there with these variables. Returns why the task cannot have this place. Raises OSError for what the
    machine lacks."""
    os.environ.update(variables)
    time.tzset()
    if cwd:
        try:
            os.makedirs(cwd, exist_ok=True)
            os.chdir(cwd)
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise
            return f"{cwd}: {error.strerror}"
        os.environ["PWD"] = cwd
    return None


class _Inbox:
    """Frames from the runner. Bytes that have arrived survive an exception in the middle of waiting."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def receive(self) -> dict[str, Any] | None:
        """The next frame; None when the runner is gone."""
        if not self._wait_for(4):
            return None
        size = 4 + int.from_bytes(self._arrived[:4], "big")
        if not self._wait_for(size):
            return None
        body = self._arrived[4:size].decode("ascii")
        del self._arrived[:size]
        message, _ = _decode(body, 0)
        return message  # type: ignore[no-any-return]

    def _wait_for(self, size: int) -> bool:
        while len(self._arrived) < size:
            chunk = _os_read(COMMANDS_FD, _READ_BYTES)
            if not chunk:
                return False
            self._arrived += chunk
        return True


def _final_answer(space: _Space) -> Callable[[object], NoReturn]:
    def final_answer(answer: object) -> NoReturn:
        # Turned into text within the step: a __str__ that fails or hangs is then the step's failure.
        text = answer_text(answer)
        if not space.answered:
            space.answered, space.answer = True, text
        raise FinalAnswer

    final_answer.__qualname__ = "final_answer"
    final_answer.__module__ = "__main__"
    return final_answer


def _bind(
    name: str, required: list[str], optional: list[str], args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Binds arguments to the tool's declared inputs, as a function would. Raises TypeError."""
    inputs = [*required, *optional]
    if len(args) > len(inputs):
        raise TypeError(f"{name}() takes {len(inputs)} arguments ({', '.join(inputs)}), {len(args)} were given")
    bound = dict(zip(inputs, args, strict=False))
    for key, value in kwargs.items():
        if key not in inputs:
            raise TypeError(f"{name}() has no argument {key!r}; it takes {', '.join(inputs)}")
        if key in bound:
            raise TypeError(f"{name}() got two values for argument {key!r}")
        bound[key] = value
    missing = [key for key in required if key not in bound]
    if missing:
        raise TypeError(f"{name}() misses {', '.join(missing)}")
    return bound


def _send(message: dict[str, Any]) -> None:
    body = "".join(_encode(message, 0)).encode("ascii")
    rest = memoryview(len(body).to_bytes(4, "big") + body)
    while rest:
        rest = rest[_os_write(FRAMES_FD, rest) :]
