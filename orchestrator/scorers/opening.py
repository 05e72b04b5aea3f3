"""Opens the scorer that `env.scoring_strategy` names, checked before anything else is opened."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.plugins import PREFIX
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.scorers.processes import GradingProcesses
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import Ended, Record, RolloutPlan, Score

if TYPE_CHECKING:
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import EnvSettings

log = logging.getLogger(__name__)

JUDGE = "judge"


async def open_scorer(config: Config, stack: AsyncExitStack) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable."""
    env = config.env
    if env.scoring_strategy.startswith(PREFIX):
        return await _controlled(env.scoring_strategy, env, stack)
    ours = "correctness" if env.scoring_strategy == JUDGE else env.scoring_strategy
    rules = await _controlled(StrategyScorer(ours, env.length_penalty_weight, env.combined_weights), env, stack)
    if env.scoring_strategy == JUDGE:
        return await _judge(config, rules, stack)
    return _Logged(rules, ours) if env.debug_scoring else rules


async def _controlled(scorer: StrategyScorer | str, env: EnvSettings, stack: AsyncExitStack) -> ControlledScorer:
    """In processes of its own. A rollout at which a strategy of ours fails is wrong, as `correctness` tells."""
    processes = GradingProcesses(scorer, env.scorer_timeout)
    stack.push_async_callback(processes.aclose)
    await processes.open()
    return ControlledScorer(processes, {} if isinstance(scorer, str) else {"correctness": 0.0})


@dataclass(frozen=True, slots=True)
class _Logged:
    """`env.debug_scoring`: every part of every score."""

    scorer: Scorer
    name: str

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """As the scorer's."""
        score = await self.scorer.score(plan, record, ended)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in score.parts.items())
        log.info("%s: %s %.4f (%s)", plan.rollout_id, self.name, score.value, shown)
        return score


async def _judge(config: Config, rules: Scorer, stack: AsyncExitStack) -> Scorer:
    from orchestrator.completion.base import Endpoint
    from orchestrator.completion.chat import OpenAICompleter
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
        rules,
        model=env.judge_model_name,
        max_tokens=env.judge_max_tokens,
    )
