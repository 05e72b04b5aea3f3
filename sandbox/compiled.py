"""What `dataclasses` and `re` compile while modules are imported, compiled with the image.

A tenth of all importing is this: both compile text at run time, at every start the same text.
"""

from __future__ import annotations

import _sre  # type: ignore[import-not-found]
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

Sources = dict[str, CodeType]  # by the text of a data class's methods
Patterns = dict[object, tuple[object, ...]]  # by text and flags: what `_sre.compile` takes


@contextmanager
def compiled(sources: Mapping[str, CodeType], patterns: Mapping[object, tuple[object, ...]]) -> Iterator[None]:
    """Within this block nothing that is in these is compiled again."""

    def execute(text: str, namespace: dict[str, Any], names: dict[str, Any]) -> None:
        exec(sources.get(text) or _code(text), namespace, names)  # noqa: S102

    def compile_pattern(pattern: Any, flags: int = 0) -> re.Pattern[Any]:
        known = patterns.get((pattern, flags))
        return _sre.compile(*known) if known else _usual(pattern, flags)

    with _instead(execute, compile_pattern):
        yield


@contextmanager
def recording() -> Iterator[tuple[Sources, Patterns]]:
    """Within this block what is compiled is written down."""
    sources: Sources = {}
    patterns: Patterns = {}

    def execute(text: str, namespace: dict[str, Any], names: dict[str, Any]) -> None:
        sources[text] = _code(text)
        exec(sources[text], namespace, names)  # noqa: S102

    def compile_pattern(pattern: Any, flags: int = 0) -> re.Pattern[Any]:
        made = _usual(pattern, flags)
        if isinstance(pattern, str | bytes):
            patterns[pattern, int(flags)] = _Sre.last
        return made

    _compiler._sre = _Sre()
    try:
        with _instead(execute, compile_pattern):
            yield sources, patterns
    finally:
        _compiler._sre = _sre


def _code(text: str) -> CodeType:
    """As `exec` in `dataclasses` makes it, without what this module has from `__future__`."""
    return compile(text, "<string>", "exec", dont_inherit=True)


class _Sre:
    """`_sre` that keeps what its last pattern was compiled of."""

    last: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_sre, name)

    def compile(self, pattern: Any, flags: int, code: list[int], *groups: Any) -> re.Pattern[Any]:
        _Sre.last = (pattern, int(flags), [int(word) for word in code], *groups)  # plain, as marshal wants it
        made: re.Pattern[Any] = _sre.compile(*_Sre.last)
        return made


_compiler: Any = re._compiler  # type: ignore[attr-defined]
_usual: Callable[[Any, int], re.Pattern[Any]] = _compiler.compile


@contextmanager
def _instead(execute: Callable[..., None], compile_pattern: Callable[..., re.Pattern[Any]]) -> Iterator[None]:
    vars(dataclasses)["exec"] = execute  # found before the built-in one
    _compiler.compile = compile_pattern
    try:
        yield
    finally:
        del vars(dataclasses)["exec"]
        _compiler.compile = _usual
