"""Compiles with the image what every start would compile anew from the same text.

Such compiling is a tenth of the import time: `dataclasses` writes the methods of a class as text, and `re`
compiles patterns. The template of the system prompt is compiled here too.
"""

import _sre  # type: ignore[import-not-found]
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

Compiled = dict[tuple[object, ...], Any]  # (kind, text, …) to code or plain data, as `marshal` takes it
_results: Mapping[tuple[object, ...], Any] = {}
_recorded: Compiled | None = None


def remembered(key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What `make` returned when the image was made, where that is known; else what it returns now."""
    result = _results.get(key)
    if result is None:
        result = make()
        if _recorded is not None:
            _recorded[key] = result
    return result


@contextmanager
def compiled(results: Mapping[tuple[object, ...], Any]) -> Iterator[None]:
    """Within this block nothing that is in `results` is compiled again."""
    global _results
    _results = results
    try:
        with _watched():
            yield
    finally:
        _results = {}


@contextmanager
def recording() -> Iterator[Compiled]:
    """Collects everything that is compiled within this block."""
    global _recorded
    recorded: Compiled = {}
    _recorded = recorded
    try:
        with _watched():
            yield recorded
    finally:
        _recorded = None


@contextmanager
def _watched() -> Iterator[None]:
    """`dataclasses` and `re` compile through this module."""
    vars(dataclasses)["exec"] = _execute  # hides the built-in one
    _compiler.compile = _pattern
    try:
        yield
    finally:
        del vars(dataclasses)["exec"]
        _compiler.compile = _usual


def _execute(text: str, namespace: dict[str, Any], names: dict[str, Any]) -> None:
    def make() -> CodeType:  # compiled as `exec` does, without this module's `__future__` imports
        return compile(text, "<string>", "exec", dont_inherit=True)

    exec(remembered(("class", text), make), namespace, names)  # noqa: S102


def _pattern(pattern: Any, flags: int = 0) -> re.Pattern[Any]:
    if not isinstance(pattern, str | bytes) or (_recorded is None and ("pattern", pattern, flags) not in _results):
        return _usual(pattern, flags)
    result: re.Pattern[Any] = _sre.compile(
        *remembered(("pattern", pattern, int(flags)), lambda: _parts(pattern, flags))
    )
    return result


def _parts(pattern: str | bytes, flags: int) -> tuple[Any, ...]:
    """What `re` passes to `_sre.compile` for this pattern, as plain data."""
    _compiler._sre = stand_in = _Recorder()
    try:
        _usual(pattern, flags)
    finally:
        _compiler._sre = _sre
    return stand_in.parts


class _Recorder:
    """Stands in for `_sre` and keeps the arguments of `compile`."""

    parts: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_sre, name)

    def compile(self, pattern: Any, flags: int, code: list[int], *groups: Any) -> Any:
        self.parts = (pattern, int(flags), [int(word) for word in code], *groups)


_compiler: Any = re._compiler  # type: ignore[attr-defined]
_usual: Callable[[Any, int], re.Pattern[Any]] = _compiler.compile
