"""`orchestrator serve`: groups of scored rollouts for a trainer, through Atropos' run-api."""

from orchestrator.completion.find_tokenizer import find_tokenizer
from orchestrator.settings.config import Config


def run(config: Config) -> int:
    """0: total_steps groups are delivered; 1: not all; 128 + n after a signal."""
    from orchestrator.atropos.terms import check_servable

    check_servable(config.env)
    # Before atroposlib, whose import takes seconds: a tokenizer that cannot be loaded is reported at once.
    tokenizer = find_tokenizer(config.env, config.openai[0].model_name)
    from orchestrator.atropos import OrchestratorEnv

    return OrchestratorEnv.run_serve(config, tokenizer)
