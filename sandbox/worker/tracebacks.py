"""Tracebacks as the model sees them: the lines it wrote, not those of the harness or of libraries.

Runs inside the worker, so it looks builtins up in its own copy (see `sandbox.worker.worker`).
"""

import builtins
from collections.abc import Iterator
from traceback import StackSummary, TracebackException

from sandbox.texts import shorten

globals()["__builtins__"] = dict(vars(builtins))


def describe_error(error: BaseException, max_chars: int) -> str:
    """The traceback with causes and exception groups; only the type if the code broke `traceback`."""
    try:
        trace = TracebackException.from_exception(error)
        for part in _parts(trace):
            own = [frame for frame in part.stack if frame.filename.startswith("<step ")]
            part.stack = StackSummary.from_list(own)
        lines = trace.format() if trace.stack else trace.format_exception_only()
        return shorten("".join(lines).rstrip("\n"), max_chars)
    except BaseException:
        return f"{type(error).__name__} (its traceback cannot be shown)"


def _parts(trace: TracebackException) -> Iterator[TracebackException]:
    yield trace
    for nested in (trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())):
        if nested is not None:
            yield from _parts(nested)
