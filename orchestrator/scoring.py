"""Opens the scorer that `env.scoring_strategy` names, checked before anything else is opened."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.plugins import PREFIX
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.strategies import StrategyScorer

if TYPE_CHECKING:
    from orchestrator.config import Config

JUDGE = "judge"


async def open_scorer(config: Config, stack: AsyncExitStack) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable."""
    env = config.env
    if env.scoring_strategy.startswith(PREFIX):
        from orchestrator.scorers.python import PythonScorer

        scorer = PythonScorer(env.scoring_strategy, env.scorer_timeout)
        stack.push_async_callback(scorer.aclose)
        await scorer.open()
        return scorer
    if env.scoring_strategy == JUDGE:
        return await _judge(config, stack)
    return StrategyScorer(env.scoring_strategy, env.length_penalty_weight, env.debug_scoring, env.combined_weights)


async def _judge(config: Config, stack: AsyncExitStack) -> Scorer:
    from orchestrator.completion.base import Endpoint
    from orchestrator.completion.openai import OpenAICompleter
    from orchestrator.scorers.judge import JudgeScorer

    env = config.env
    if env.judge_base_url is None or env.judge_model_name is None:
        raise ConfigError(
            "env.scoring_strategy judge needs --env.judge_base_url URL and --env.judge_model_name NAME"
        )
    base_url = env.judge_base_url.rstrip("/")
    if urlsplit(base_url).path == "":
        base_url += "/v1"
    endpoint = Endpoint(base_url, env.judge_model_name, config.judge_api_key.reveal(), env.scorer_timeout)
    completer = OpenAICompleter(endpoint)
    stack.push_async_callback(completer.aclose)
    if not endpoint.hosted:
        try:
            await completer.probe()
        except EnvironmentUnusable as error:
            raise EnvironmentUnusable(f"env.judge_base_url: {error}; the judge's key is JUDGE_API_KEY") from error
    return JudgeScorer(
        completer,
        model=env.judge_model_name,
        max_tokens=env.judge_max_tokens,
        length_penalty_weight=env.length_penalty_weight,
    )
