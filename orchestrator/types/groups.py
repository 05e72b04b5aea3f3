"""What is trained on. Axes: T tokens of one trajectory, G members of one group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.types.messages import Message
from orchestrator.types.outcomes import Attempt
from orchestrator.types.tasks import Task

TokenSource = Literal["sampled", "retokenized", "none"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Token-level record of an episode. `trained_T` marks the tokens to learn from.

    `logprobs_T` holds the sampled log-probability at trained places, and no meaningful value at others. It is
    None if the endpoint gives none. `segment`: which id line of the episode this is. `note`: a remark for the
    record.
    """

    tokens_T: tuple[int, ...]
    trained_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...] | None
    messages: tuple[Message, ...]
    token_source: TokenSource
    segment: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_T), len(self.trained_T)}
        if self.logprobs_T is not None:
            lengths.add(len(self.logprobs_T))
        if len(lengths) != 1:
            raise ValueError(f"tokens, mask and log-probs differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's verdict: a finite number in [0, 1], its parts, and the evidence for it.

    `evidence`: JSON, for a score that cannot be computed again from the record, such as a judge's. Its `failure`
    says what went wrong with grading, if that is the rollout's own doing.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"a score lies in [0, 1], this one is {self.value}")

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved."""
        return is_solved(self.value, self.parts)

    @property
    def failure(self) -> str:
        """Why the scorer gave no score of its own, if that is this rollout's own doing; else empty."""
        return str(self.evidence.get("failure", ""))


def is_solved(value: float, parts: Mapping[str, float]) -> bool:
    """A task is solved if the part `correctness`, or the value if there is no such part, is at least 1."""
    return parts.get("correctness", value) >= 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One scored rollout of a group. `staleness`: how many versions the oldest policy that sampled some of it was
    behind when the group was whole; None: unknown."""

    attempt: Attempt
    trajectory: Trajectory
    score: Score
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task, to be compared with each other.

    `dropped` says why the group is no training data; None: it is complete.
    """

    number: int
    task: Task
    members_G: tuple[Member, ...]
    attempts: tuple[Attempt, ...]
    dropped: str | None = None
