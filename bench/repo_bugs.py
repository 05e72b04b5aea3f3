"""Bugs that a program can make: one small change of a source file, as swesmith's procedural ones.

Python is changed by its syntax tree, inside functions alone; other languages by operators in their lines.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
}
_IN_LINES = (
    (r" < ", " <= ", "a comparison"),
    (r" <= ", " < ", "a comparison"),
    (r" > ", " >= ", "a comparison"),
    (r" >= ", " > ", "a comparison"),
    (r" == ", " != ", "a comparison"),
    (r" != ", " == ", "a comparison"),
    (r" && ", " || ", "a condition"),
    (r" \|\| ", " && ", "a condition"),
    (r"\bif \(([^()]*)\)(?=\s*\{?\s*$)", r"if (!(\1))", "a condition"),
    (r" \+ 1\b", " + 2", "off by one"),
    (r" - 1\b", " - 2", "off by one"),
    (r" \+ (?!1\b)", " - ", "an operator"),
    (r"(?<=\w)\+\+", "--", "an operator"),
    (r" \+= ", " -= ", "an operator"),
)
_REMARK = re.compile(r"\s*(?:/?\*|//|#)")


class Bug(NamedTuple):
    """`text`: the whole file with it."""

    kind: str
    text: str


def bugs(path: Path, text: str) -> Iterator[Bug]:
    """All that there are, in the order of the file."""
    yield from _in_python(text) if path.suffix == ".py" else _in_lines(text)


def _in_lines(text: str) -> Iterator[Bug]:
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        for pattern, other, kind in () if _REMARK.match(line) else _IN_LINES:
            for match in re.finditer(pattern, line):
                changed = line[: match.start()] + match.expand(other) + line[match.end() :]
                yield Bug(kind, "".join([*lines[:number], changed, *lines[number + 1 :]]))


def _in_python(text: str) -> Iterator[Bug]:
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    # Of a function in a function each node comes once.
    for node in dict.fromkeys(
        inner for function in functions for part in function.body for inner in ast.walk(part)
    ):
        for old, kind, new in _changes(node):
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            whole = text.encode()
            yield Bug(kind, (whole[:start] + new.encode() + whole[end:]).decode())


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """What is replaced, the kind of bug, and by which text."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
            yield node, "a comparison", ast.unparse(ast.Compare(left, [_COMPARED[type(operator)]()], [right]))
        case ast.BinOp(left, ast.Add() | ast.Sub() as operator, ast.Constant(int() as number)):
            yield node, "off by one", ast.unparse(ast.BinOp(left, operator, ast.Constant(number + 1)))
        case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
            yield node, "an operator", ast.unparse(ast.BinOp(left, _COMPUTED[type(operator)](), right))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, "a condition", f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.If(test) | ast.IfExp(test):
            yield test, "a condition", f"({ast.unparse(ast.UnaryOp(ast.Not(), test))})"
        case ast.Return(ast.expr() as value):
            yield node, "a return value", ast.unparse(value)
        case ast.Constant(bool() as value):
            yield node, "a constant", str(not value)
