"""Feeding a trainer through Atropos' run-api, and `OrchestratorEnv`, the environment that Atropos users load.

run_api.py      the run-api's calls and what can go wrong with each
position.py     which groups are done, which of them the trainer took, and the files that say so
stream.py       the tasks, round after round, with those that came back
feed.py         keeps the trainer supplied: registers, fills up to the off-policy bound, delivers
service.py      the engine behind the feed
settings.py     our settings as Atropos' pydantic models, and back
environment.py  `OrchestratorEnv`; only it and settings.py import atroposlib, which takes seconds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.atropos.environment import OrchestratorEnv

__all__ = ["OrchestratorEnv"]


def __getattr__(name: str) -> Any:
    if name == "OrchestratorEnv":
        from orchestrator.atropos.environment import OrchestratorEnv

        return OrchestratorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
