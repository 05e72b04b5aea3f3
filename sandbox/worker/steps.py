"""Runs the code of one step in a module's namespace, as CPython would run a script.

Each step has a file name of its own and its source in `linecache`, so that tracebacks, `inspect` and
`warnings` can show its lines. `await` works at the top level.
Runs inside the worker, so it looks builtins up in its own copy (see `sandbox.worker.worker`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

globals()["__builtins__"] = dict(vars(builtins))

_compile, _eval = compile, eval
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = inspect.CO_COROUTINE
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
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
            self._execute(_compile(tree, filename, "exec", _AWAIT, True))
            return self._execute(_compile(ast.Expression(last.value), filename, "eval", _AWAIT, True))
        self._execute(_compile(tree, filename, "exec", _AWAIT, True))
        name = _assigned_name(last)
        return None if name is None else self._names.get(name)

    def _execute(self, code: CodeType) -> object:
        result = _eval(code, self._names)
        if not code.co_flags & _COROUTINE:
            return result
        if self._loop is None:
            import asyncio  # slow to import, and seldom needed

            self._loop = asyncio.Runner()
        return self._loop.run(result)


def _assigned_name(statement: ast.stmt | None) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()) | ast.AugAssign(target=ast.Name(id=name)):
            return name
    return None
