"""`python -m orchestrator.atropos serve|process|evaluate`: the environment by Atropos' own entry point."""

from __future__ import annotations

from orchestrator.atropos.environment import OrchestratorEnv

if __name__ == "__main__":
    OrchestratorEnv.cli()
