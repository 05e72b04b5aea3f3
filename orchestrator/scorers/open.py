"""Opens the scorer that a run asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.endpoints import judge_serves, openai_root
from orchestrator.completion.http import HttpClient
from orchestrator.completion.startup import Patience, wait_sayer
from orchestrator.errors import ConfigError
from orchestrator.rules.plugins import PREFIX
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.scorers.judge import JudgeScorer
from orchestrator.scorers.processes import GradingProcesses
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import Ended, Record, RolloutPlan, Score

if TYPE_CHECKING:
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import EnvSettings

log = logging.getLogger(__name__)

JUDGE = "judge"


async def open_scorer(
    config: Config,
    stack: AsyncExitStack,
    say: Callable[[str], None] = log.warning,
    meanwhile: asyncio.TaskGroup | None = None,
) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable.

    `say` is told of a wait for the judge's endpoint. `meanwhile`: where that wait goes on; None: it is over when
    this returns.
    """
    env = config.env
    if env.scoring_strategy.startswith(PREFIX):
        return await _controlled(env.scoring_strategy, env, stack)
    ours = "correctness" if env.scoring_strategy == JUDGE else env.scoring_strategy
    rules = await _controlled(StrategyScorer(ours, env.length_penalty_weight, env.combined_weights), env, stack)
    if env.scoring_strategy == JUDGE:
        return await _judge(config, rules, stack, say, meanwhile)
    return _LoggedScorer(rules, ours) if env.debug_scoring else rules


async def _controlled(scorer: StrategyScorer | str, env: EnvSettings, stack: AsyncExitStack) -> ControlledScorer:
    """The scorer in processes of its own. A rollout at which one of our strategies fails counts as wrong."""
    processes = GradingProcesses(scorer, env.scorer_timeout)
    stack.push_async_callback(processes.aclose)
    await processes.open()
    return ControlledScorer(processes, {} if isinstance(scorer, str) else {"correctness": 0.0})


@dataclass(frozen=True, slots=True)
class _LoggedScorer:
    """Logs every part of every score, for `env.debug_scoring`."""

    scorer: Scorer
    name: str

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """The scorer's own score."""
        score = await self.scorer.score(plan, record, ended)
        parts = ", ".join(f"{name} {value:.3f}" for name, value in score.parts.items())
        log.info("%s: %s %.4f (%s)", plan.rollout_id, self.name, score.value, parts)
        return score


async def _judge(
    config: Config,
    rules: Scorer,
    stack: AsyncExitStack,
    say: Callable[[str], None],
    meanwhile: asyncio.TaskGroup | None,
) -> Scorer:
    env = config.env
    if env.judge_base_url is None or env.judge_model_name is None:
        raise ConfigError(
            "env.scoring_strategy judge needs --env.judge_base_url URL and --env.judge_model_name NAME"
        )
    key = config.judge_api_key.reveal()
    judge = Endpoint(openai_root(env.judge_base_url), env.judge_model_name, key, env.scorer_timeout)
    completer = ChatCompleter(HttpClient(judge), strict=False)
    stack.push_async_callback(completer.aclose)
    if not judge.hosted:
        # The judge is as likely to be loading as the models that are judged.
        timeout_s = max(server.startup_timeout for server in config.openai)
        serves = judge_serves(completer, Patience(timeout_s, wait_sayer(say)))
        if meanwhile is None:
            await serves
        else:
            meanwhile.create_task(serves, name="judge")
    return JudgeScorer(completer, rules, model=env.judge_model_name, max_tokens=env.judge_max_tokens)
