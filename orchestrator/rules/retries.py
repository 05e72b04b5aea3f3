"""Which failures are tried again, and how often. Pure. `engine/executor` does it."""

import re

from orchestrator.rules.backoff import Backoff
from orchestrator.types import FailedName

RETRIED = frozenset(
    {
        FailedName.LLM_ERROR,
        FailedName.TOOL_ERROR,
        FailedName.LAUNCH_ERROR,
        FailedName.SANDBOX_LOST,
        FailedName.DOCKER_ERROR,
        FailedName.AGENT_ERROR,
        FailedName.CANCELLED,  # by an earlier process of the run
    }
)
# The sandbox is gone, and nothing of it is the policy's doing: the rollout goes on in another one.
GONE_ON = frozenset({FailedName.SANDBOX_LOST, FailedName.DOCKER_ERROR, FailedName.CANCELLED})
# Of one rollout: a program that fails without a completion fails again, as a rule, so it is tried again once.
MAX_AGENT_ERRORS = 2
BEFORE_RETRIES = Backoff(first_s=0.5, most_s=15.0, spread=0.5)
_NUMBER = re.compile(r" \d+\b")
_CAUSE_CHARS = 80
MAX_EXCUSED = 5  # so many failures of one rollout can be put down to an outage


def cause(refused: str) -> str:
    """In few words why a rollout could not go on, the same for all that could not for this reason."""
    return _NUMBER.sub("", refused.partition(":")[0])[:_CAUSE_CHARS]
