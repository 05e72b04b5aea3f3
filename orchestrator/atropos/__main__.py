"""`python -m orchestrator.atropos serve|process|evaluate`: runs the environment as Atropos users do."""

from orchestrator.atropos.environment import OrchestratorEnv

if __name__ == "__main__":
    OrchestratorEnv.cli()
