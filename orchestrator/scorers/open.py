"""Opens the scorer that a run asks for."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.endpoints import judge_serves, openai_root
from orchestrator.completion.http import HttpClient
from orchestrator.completion.startup import Patience, wait_sayer
from orchestrator.errors import ConfigError
from orchestrator.rules.plugins import PREFIX
from orchestrator.rules.redact import Secret
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import ControlledScorer
from orchestrator.scorers.grader import GRADER, GraderScorer
from orchestrator.scorers.judge import JudgeScorer
from orchestrator.scorers.processes import GradingProcesses
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.settings.scoring import ScoringSettings
from orchestrator.types import Ended, Record, RolloutPlan, Score

log = logging.getLogger(__name__)

JUDGE = "judge"


async def open_scorer(
    settings: ScoringSettings,
    judge_key: Secret,
    judge_startup_s: float,
    stack: AsyncExitStack,
    say: Callable[[str], None] = log.warning,
    meanwhile: asyncio.TaskGroup | None = None,
) -> Scorer:
    """One scorer for a whole run, closed with `stack`. Raises ConfigError, EnvironmentUnusable.

    `judge_startup_s`: how long a judge that is still loading is waited for. `say` gets a line about that wait.
    `meanwhile`: where it goes on; None: it is over when this returns.
    """
    strategy = settings.scoring_strategy
    if strategy == GRADER:
        graded = GraderScorer(settings.reward_key)
        return _LoggedScorer(graded, GRADER) if settings.debug_scoring else graded
    if strategy.startswith(PREFIX):
        return await _controlled(strategy, settings, stack)
    ours = "correctness" if strategy == JUDGE else strategy
    scorer = StrategyScorer(ours, settings.length_penalty_weight, settings.combined_weights)
    rules = await _controlled(scorer, settings, stack)
    if strategy != JUDGE:
        return _LoggedScorer(rules, ours) if settings.debug_scoring else rules
    completer = _judge(settings, judge_key)
    stack.push_async_callback(completer.aclose)
    if not completer.endpoint.hosted:
        # The judge is as likely to be loading as the models that are judged.
        serves = judge_serves(completer, Patience(judge_startup_s, wait_sayer(say)))
        if meanwhile is None:
            await serves
        else:
            meanwhile.create_task(serves, name="judge")
    return JudgeScorer(completer, rules, model=completer.endpoint.model, max_tokens=settings.judge_max_tokens)


async def _controlled(
    scorer: StrategyScorer | str, settings: ScoringSettings, stack: AsyncExitStack
) -> ControlledScorer:
    """The scorer in processes of its own. A rollout at which one of our strategies fails counts as wrong."""
    processes = GradingProcesses(scorer, settings.scorer_timeout)
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


def _judge(settings: ScoringSettings, key: Secret) -> ChatCompleter:
    """Raises ConfigError."""
    if settings.judge_base_url is None or settings.judge_model_name is None:
        raise ConfigError(
            "env.scoring_strategy judge needs --env.judge_base_url URL and --env.judge_model_name NAME"
        )
    root, model = openai_root(settings.judge_base_url), settings.judge_model_name
    return ChatCompleter(HttpClient(Endpoint(root, model, key.reveal(), settings.scorer_timeout)), strict=False)
