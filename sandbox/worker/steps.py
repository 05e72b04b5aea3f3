"""Runs the code of one step in a module's namespace, as CPython would run a script.

Each step has a file name of its own and its source in `linecache`, so that tracebacks, `inspect` and
`warnings` can show its lines. `await` works at the top level.
Runs inside the worker, so it looks builtins up in its own copy (see `sandbox.worker.worker`).
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Mapping
from types import CodeType, CoroutineType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

globals()["__builtins__"] = dict(vars(builtins))

_compile, _eval = compile, eval
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = inspect.CO_COROUTINE
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
_source_lines = linecache.cache


class StepRunner:
    """Runs steps in `module`, one after the other."""

    def __init__(self, module: ModuleType) -> None:
        self._names = module.__dict__
        self._loop: asyncio.Runner | None = None

    def run(self, step: int, code: str) -> object:
        """The value of the last expression, or of a last assignment to one name; else None."""
        filename = f"<step {step}>"  # in tracebacks
        _source_lines[filename] = (len(code), None, code.splitlines(keepends=True), filename)
        tree = _compile(code, filename, "exec", ast.PyCF_ONLY_AST | _AWAIT, True)
        code_object = _compile(tree, filename, "exec", _AWAIT, True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # Statements of code that awaits run one by one: those that await nothing may start a loop of their own.
        parts = [[one] for one in tree.body] if code_object.co_flags & _COROUTINE else [tree.body]
        flags = _AWAIT | code_object.co_flags & _FUTURE
        for part in parts:
            self._execute(_compile(ast.Module(part, []), filename, "exec", flags, True))
        if last is not None:
            return self._execute(_compile(ast.Expression(last.value), filename, "eval", flags, True))
        name = _assigned_name(tree.body[-1] if tree.body else None)
        return None if name is None else self._names.get(name)

    def call(self, tool: Callable[..., Any], arguments: Mapping[str, Any]) -> object:
        """What the tool returns, or gives when it is awaited."""
        result = tool(**arguments)
        return self._open_loop().run(result) if isinstance(result, CoroutineType) else result

    def _execute(self, code: CodeType) -> object:
        """Runs it, also where a loop runs already: a managed agent's step is part of a step that may await."""
        running = _running_loop()
        if running is not None:
            _set_running_loop(None)
        try:
            result = _eval(code, self._names)
            return self._open_loop().run(result) if code.co_flags & _COROUTINE else result
        finally:
            if running is not None:
                _set_running_loop(running)

    def _open_loop(self) -> asyncio.Runner:
        """The loop of all steps, or a new one if the code has closed it. It is the current one of the thread again
        after the code's own `asyncio.run`."""
        import asyncio  # slow to import, and seldom needed

        if self._loop is None or self._loop.get_loop().is_closed():
            self._loop = asyncio.Runner()
        asyncio.set_event_loop(self._loop.get_loop())
        return self._loop


def _running_loop() -> Any:
    """The thread's running loop. None without asyncio, which is seldom imported."""
    return sys.modules["_asyncio"]._get_running_loop() if "_asyncio" in sys.modules else None


def _set_running_loop(loop: Any) -> None:
    sys.modules["_asyncio"]._set_running_loop(loop)


def _assigned_name(statement: ast.stmt | None) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()) | ast.AugAssign(target=ast.Name(id=name)):
            return name
    return None
