"""`python -m orchestrator.atropos serve|process|evaluate`: runs the environment as Atropos users do."""

from __future__ import annotations

from orchestrator.atropos.environment import OrchestratorEnv

if __name__ == "__main__":
    OrchestratorEnv.cli()
