"""How an attempt ended."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.types.plans import RolloutPlan
from orchestrator.types.record import Record


class EndedName(StrEnum):
    """Ends that are the policy's own doing: scored."""

    FINISHED = "finished"
    MAX_STEPS = "max_steps"
    NO_ANSWER = "no_answer"
    INVALID_ANSWER = "invalid_answer"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CONTEXT_LENGTH = "context_length"
    OUT_OF_MEMORY = "out_of_memory"
    SANDBOX_CRASHED = "sandbox_crashed"


class FailedName(StrEnum):
    """Ends that are not the policy's doing: never scored."""

    LLM_ERROR = "llm_error"
    TOOL_ERROR = "tool_error"
    LAUNCH_ERROR = "launch_error"
    SANDBOX_LOST = "sandbox_lost"
    DOCKER_ERROR = "docker_error"
    AGENT_ERROR = "agent_error"
    BAD_TASK = "bad_task"
    SCORER_ERROR = "scorer_error"
    RECORD_ERROR = "record_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout ended in a way that is scored. `detail` names the limit for `budget`."""

    name: EndedName
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rollout broke. It has no reward, so a lost container cannot become training data.

    `reason`: one line, behind which there may be more, such as the last words of a program.
    """

    name: FailedName
    reason: str

    @property
    def headline(self) -> str:
        """The first line of the reason."""
        return self.reason.partition("\n")[0]


Outcome = Ended | Failed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One plan carried out: its record and its outcome.

    `ungraded`: how the rollout ended, if the outcome is `cancelled` because the run was stopped during grading.
    """

    plan: RolloutPlan
    record: Record
    outcome: Outcome
    ungraded: Ended | None = None

    @property
    def lacks_turns(self) -> bool:
        """Whether it was cancelled, and what it was served is not in its record but beside it, if anywhere."""
        return self.outcome.name is FailedName.CANCELLED and self.ungraded is None and not self.record.turns


def last_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The last attempt of each rollout of a group, in the order of the places."""
    last: dict[int, Attempt] = {}
    for attempt in attempts:
        latest = last.get(attempt.plan.index)
        if latest is None or attempt.plan.attempt > latest.plan.attempt:
            last[attempt.plan.index] = attempt
    return [last[index] for index in sorted(last)]
