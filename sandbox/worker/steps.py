"""Runs the code of one step in a module's namespace, as CPython would run a script.

Compiled under a file name of its own and with its source in `linecache`, so that tracebacks,
`inspect` and `warnings` can show its lines. `await` works at the top level.
Used inside the worker, so it looks builtins up in its own copy (see `worker`).
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


def step_filename(step: int) -> str:
    """What a step is called in tracebacks."""
    return f"<step {step}>"


class StepRunner:
    """Runs steps in `module`, one after the other."""

    def __init__(self, module: ModuleType) -> None:
        self._names = module.__dict__
        self._loop: asyncio.Runner | None = None

    def run(self, step: int, code: str) -> object:
        """The value of the last expression, or of a last assignment to one name; else None."""
        filename = step_filename(step)
        _source_lines[filename] = (len(code), None, code.splitlines(keepends=True), filename)
        tree = _compile(code, filename, "exec", ast.PyCF_ONLY_AST | _AWAIT, True)
        _quicken(tree)
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
            import asyncio  # as long to import as much of what a sandbox needs, and seldom asked for

            self._loop = asyncio.Runner()
        return self._loop.run(result)


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _quicken(tree: ast.Module) -> None:
    """Says in a step with loops that its names are global, as they are: CPython looks such names up a third
    quicker, and does not know that a module's names are its globals."""
    own = _below(tree, (*_SCOPES, *_COMPREHENSIONS))
    if not any(isinstance(node, _LOOPS) for node in own):
        return
    # An annotated name may not be declared, and one of a comprehension is another inside it.
    targets = [node.target for node in _below(tree) if isinstance(node, (ast.AnnAssign, ast.comprehension))]
    names = _names(own).difference(*(_names(_below(target)) for target in targets))
    declared = sorted(name for name in names if not name.startswith("__"))
    if declared:
        tree.body.insert(_after_future(tree.body), ast.Global(declared, lineno=1, col_offset=0))


def _names(nodes: list[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _below(tree: ast.AST, but_not: tuple[type[ast.AST], ...] = ()) -> list[ast.AST]:
    """It and all nodes below, without those below `but_not`. `ast.walk` uses builtins that a step may replace."""
    found = [tree]
    for node in found:
        if isinstance(node, but_not):
            continue
        for field in node._fields:
            value = getattr(node, field, None)
            found.extend(
                child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
            )
    return found


def _after_future(body: list[ast.stmt]) -> int:
    """Where the first statement may stand that is no docstring and no import from `__future__`."""
    for place, statement in enumerate(body):
        match statement:
            case ast.ImportFrom(module="__future__"):
                continue
            case ast.Expr(value=ast.Constant(value=str())) if place == 0:
                continue
        return place
    return len(body)


def _assigned_name(statement: ast.stmt | None) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()) | ast.AugAssign(target=ast.Name(id=name)):
            return name
    return None
