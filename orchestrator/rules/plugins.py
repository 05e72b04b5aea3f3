"""Objects that the operator names as `python:MODULE:NAME`: task factories, scorers, tools.

Only the command line and the configuration may name one. A data set never may: it would choose code to run.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.text import error_line

PREFIX = "python:"


def load_object(spec: str, flag: str) -> Any:
    """The object that `python:MODULE:NAME` names; modules of the current directory are found too.

    Raises ConfigError, naming `flag`, if there is no such object or the import fails.
    """
    module_name, separator, name = spec.removeprefix(PREFIX).rpartition(":")
    if not spec.startswith(PREFIX) or not separator or not module_name or not name:
        raise ConfigError(f"{flag}: {spec!r} is not of the form python:MODULE:NAME")
    folder = str(Path.cwd())
    if folder not in sys.path:
        # A console script has its own folder in sys.path, not the current directory.
        sys.path.append(folder)
    try:
        plugin: Any = importlib.import_module(module_name)
        for part in name.split("."):
            plugin = getattr(plugin, part)
    except Exception as error:  # importing runs the operator's code, which may raise anything
        raise ConfigError(f"{flag}: cannot load {spec!r}: {error_line(error)}") from error
    return plugin


def raised_at(error: BaseException) -> str:
    """Where in the operator's file it came about, as ` (FILE:LINE)`; empty if no such line is known. To be called
    where the operator's code was called."""
    _, *inside = traceback.walk_tb(error.__traceback__)
    # The last line of the first file: a library below it would not say what to mend.
    own = [(frame.f_code.co_filename, line) for frame, line in inside]
    return next((_place(file, line) for file, line in reversed(own) if file == own[0][0]), "")


def defined_at(function: Callable[..., object]) -> str:
    """Where the operator's function is, as ` (FILE:LINE)`; empty if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def _place(file: str, line: int) -> str:
    folder = Path.cwd()
    return f" ({Path(file).relative_to(folder) if Path(file).is_relative_to(folder) else file}:{line})"
