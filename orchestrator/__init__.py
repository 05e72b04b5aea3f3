"""Rollouts of smolagents agents in sealed containers, as token-exact training data.

from orchestrator import Orchestrator, load_config

async for group in Orchestrator(config).groups(tasks):
    ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.engine import Orchestrator
    from orchestrator.settings.sources import load_config

__version__ = "0.1.0"
__all__ = ["Orchestrator", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    # Lazy: `orchestrator --help` must not pay for the engine's imports.
    if name == "Orchestrator":
        from orchestrator.engine import Orchestrator

        return Orchestrator
    if name == "load_config":
        from orchestrator.settings.sources import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
