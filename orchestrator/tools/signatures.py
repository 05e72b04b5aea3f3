"""How a prompt describes a function: arguments from the annotations, texts from the docstring.

Annotations are read as text, so that a module for the sandbox need not be imported here.
"""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DESCRIPTION_CHARS = 4_000
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "Any": "any", "object": "any",
    "list": "array", "List": "array", "tuple": "array", "Sequence": "array", "Iterable": "array",
    "dict": "object", "Dict": "object", "Mapping": "object",
}  # fmt: skip
_OPTIONAL = re.compile(r"Optional\[(.*)\]")
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of a function, as smolagents describes tools."""

    description: str
    inputs: Mapping[str, Mapping[str, Any]]
    output_type: str


def of_source(function: ast.FunctionDef) -> Signature:
    """From a parsed function. Raises ValueError, which says what is missing."""
    arguments = function.args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
        raise ValueError("*args, **kwargs and positional-only arguments cannot be described in a prompt")
    plain = list(zip(arguments.args, _padded(arguments.defaults, len(arguments.args)), strict=True))
    plain += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    shapes = {argument.arg: (_unparsed(argument.annotation), default is not None) for argument, default in plain}
    return _signature(ast.get_docstring(function), shapes, _unparsed(function.returns))


def of_function(function: Callable[..., Any]) -> Signature:
    """From a function. Raises ValueError, which says what is missing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ValueError("its arguments are not known") from None
    shapes = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError("*args, **kwargs and positional-only arguments cannot be described in a prompt")
        shapes[name] = (_text(parameter.annotation), parameter.default is not parameter.empty)
    return _signature(inspect.getdoc(function), shapes, _text(signature.return_annotation))


def _signature(
    docstring: str | None, shapes: Mapping[str, tuple[str | None, bool]], returns: str | None
) -> Signature:
    """`shapes`: argument → (annotation, whether it has a default)."""
    description, texts = _documented(docstring or "")
    if not description:
        raise ValueError("it has no docstring, which is what the agent is told of it")
    inputs: dict[str, dict[str, Any]] = {}
    for name, (annotation, has_default) in shapes.items():
        kind, nullable = _type(annotation, f"argument {name}")
        inputs[name] = {"type": kind, "description": texts.get(name, name)}
        if nullable or has_default:
            inputs[name]["nullable"] = True
    return Signature(description[:MAX_DESCRIPTION_CHARS], inputs, _type(returns, "the result")[0])


def _type(annotation: str | None, what: str) -> tuple[str, bool]:
    """(smolagents' type, whether None is one of the values)."""
    if not annotation:
        raise ValueError(f"{what} has no type annotation")
    text = re.sub(r"\b(typing|collections\.abc)\.", "", annotation).strip("'\"")
    nullable = False
    if match := _OPTIONAL.fullmatch(text):
        text, nullable = match[1], True
    parts = [part.strip() for part in text.split("|")] if "[" not in text.partition("|")[0] else [text]
    if "[" in text and text.endswith("| None"):
        parts = [text.removesuffix("| None").strip(), "None"]
    nullable = nullable or "None" in parts
    kinds = {_TYPES.get(part.partition("[")[0].strip()) for part in parts if part != "None"}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(
            f"{what} is of type {annotation}; there are {', '.join(sorted(_TYPES))}, and None beside one"
        )
    return str(kinds.pop()), nullable


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """(description, argument → text), from a docstring with sections in Google's style."""
    described: list[str] = []
    texts: dict[str, str] = {}
    section, current = "", ""
    for line in docstring.strip().splitlines():
        if match := _SECTION.fullmatch(line):
            section, current = match[1], ""
        elif not section:
            described.append(line.rstrip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            if match := _ARGUMENT.fullmatch(line.strip()):
                current = match[1]
                texts[current] = match[2]
            elif current:
                texts[current] += f" {line.strip()}"
    return "\n".join(described).strip(), texts


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _unparsed(annotation: ast.expr | None) -> str | None:
    return None if annotation is None else ast.unparse(annotation)


def _padded(defaults: list[ast.expr], size: int) -> list[ast.expr | None]:
    return [*([None] * (size - len(defaults))), *defaults]
