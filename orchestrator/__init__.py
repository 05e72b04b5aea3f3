"""Rollouts of smolagents agents in sealed containers, as token-exact training data.

from orchestrator import Orchestrator, load_config

async for group in Orchestrator(config).groups(tasks):
    ...

docs/library.md has the rest: rows, programs without an event loop, trainers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.engine.orchestrator import Orchestrator
    from orchestrator.engine.sync import SyncOrchestrator
    from orchestrator.errors import ConfigError, EnvironmentUnusable, OrchestratorError, RunUnhealthy
    from orchestrator.rules.observer import Listener, Observer
    from orchestrator.run.rows import Row
    from orchestrator.settings.config import Config
    from orchestrator.settings.sources import load_config, load_tasks
    from orchestrator.types import BadTask, Group, Task

__version__ = "0.1.0"
_HOMES = {
    "Orchestrator": "engine.orchestrator",
    "SyncOrchestrator": "engine.sync",
    "Config": "settings.config",
    "load_config": "settings.sources",
    "load_tasks": "settings.sources",
    "Task": "types",
    "BadTask": "types",
    "Group": "types",
    "Row": "run.rows",
    "Observer": "rules.observer",
    "Listener": "rules.observer",
    "OrchestratorError": "errors",
    "ConfigError": "errors",
    "EnvironmentUnusable": "errors",
    "RunUnhealthy": "errors",
}
__all__ = [
    "BadTask",
    "Config",
    "ConfigError",
    "EnvironmentUnusable",
    "Group",
    "Listener",
    "Observer",
    "Orchestrator",
    "OrchestratorError",
    "Row",
    "RunUnhealthy",
    "SyncOrchestrator",
    "Task",
    "__version__",
    "load_config",
    "load_tasks",
]


def __getattr__(name: str) -> Any:
    # Lazy: `orchestrator --help` must not pay for the engine's imports.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"orchestrator.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
