"""Objects that the operator names as `python:MODULE:NAME`: task factories, scorers, tools.

Only the command line and the configuration may name one. A data set never may: it would choose code to run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.text import told

PREFIX = "python:"


def load_object(spec: str, flag: str) -> Any:
    """The object that `python:MODULE:NAME` names; modules of the current directory are found too.

    Raises ConfigError, naming `flag`, if there is no such object or the import fails.
    """
    module_name, separator, name = spec.removeprefix(PREFIX).rpartition(":")
    if not spec.startswith(PREFIX) or not separator or not module_name or not name:
        raise ConfigError(f"{flag}: {spec!r} is not of the form python:MODULE:NAME")
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script has its own folder in sys.path, not the current directory.
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the operator's code, which may raise anything
        raise ConfigError(f"{flag}: cannot load {spec!r}: {told(error)}") from error
    return found
