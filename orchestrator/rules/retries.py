"""Which failures are tried again, and how often. Pure. `engine/executor` does it."""

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
# Of one rollout: a program that fails without a completion fails again, as a rule, so it is tried again once.
MAX_AGENT_ERRORS = 2
BEFORE_RETRIES = Backoff(first_s=0.5, most_s=15.0, spread=0.5)
MAX_EXCUSED = 5  # so many failures of one rollout can be put down to an outage
