"""What a host is set up with, as one value: `HostSetup`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.agents.equipment import Equipment
from orchestrator.completion.callback import Sampler
from orchestrator.completion.endpoints import CompletionNeeds
from orchestrator.completion.startup import Wait
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.rules.policy import Policy
from orchestrator.settings.config import Config

log = logging.getLogger(__name__)


def completion_needs(config: Config) -> CompletionNeeds:
    """What a run of these settings asks of its endpoints."""
    return CompletionNeeds(config.openai, config.env, config.env, config.agent_spec())


@dataclass(frozen=True, slots=True)
class HostSetup:
    """`notes` collects what people should know before the first rollout.

    `say`: gets a line when a service goes away or comes back, and while an endpoint is waited for. `on_wait` gets
    such waits instead. `on_node`: a node of a cluster works (None), or why it gets no rollouts. `policy`: which
    weights a trainer says it serves. `sampler` samples in the place of an endpoint. `cost_limit`: of the
    completions that are sampled on this machine; None: there is none. `equipment`: what another machine has read
    from files that this one may not have.
    """

    config: Config
    notes: list[str] = field(default_factory=list)
    say: Callable[[str], None] = log.warning
    on_wait: Callable[[Wait], None] | None = None
    on_node: Callable[[str, str | None], None] = lambda node, away: None
    policy: Policy = field(default_factory=Policy)
    sampler: Sampler | None = None
    cost_limit: CostLimit | None = None
    equipment: Equipment | None = None
