"""What scoring again has changed, counted."""

from collections import Counter
from dataclasses import dataclass, field

from orchestrator.run.line import RecordedAttempt
from orchestrator.types import Failed, Score


@dataclass(slots=True)
class Change:
    """Rollouts that had a score and have one again. `then`, `now`: sums of their scores."""

    rollouts: int = 0
    higher: int = 0
    lower: int = 0
    then: float = 0.0
    now: float = 0.0
    solved_then: int = 0
    solved_now: int = 0

    @property
    def changed(self) -> int:
        """How many have another score."""
        return self.higher + self.lower

    def add(self, then: Score, now: Score) -> None:
        """Counts one rollout."""
        self.rollouts += 1
        self.higher += now.value > then.value
        self.lower += now.value < then.value
        self.then += then.value
        self.now += now.value
        self.solved_then += then.solved
        self.solved_now += now.solved


@dataclass(slots=True)
class Changes:
    """All attempts of a record, before and after.

    `gained`: outcomes of those that have a score only now. `lost`: outcomes that those have now which had one.
    `unscored`: outcomes of those that never had one. `reasons`: the first reason of each outcome in `lost`.
    """

    all: Change = field(default_factory=Change)
    by_outcome: dict[str, Change] = field(default_factory=dict)
    by_source: dict[str, Change] = field(default_factory=dict)
    gained: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    unscored: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    blamed: Counter[str] = field(default_factory=Counter)  # scored 0 as grading fails on them; why

    def add(self, then: RecordedAttempt, now: RecordedAttempt) -> None:
        """Counts one attempt."""
        outcome = str(now.outcome.name)
        if now.score is not None and now.score.failure:
            self.blamed[now.score.failure] += 1
        if then.score is not None and now.score is not None:
            for change in (
                self.all,
                self.by_outcome.setdefault(outcome, Change()),
                self.by_source.setdefault(now.source, Change()),
            ):
                change.add(then.score, now.score)
        elif now.score is not None:
            self.gained[str(then.outcome.name)] += 1
        elif isinstance(now.outcome, Failed):
            if then.score is not None:
                self.lost[outcome] += 1
                self.reasons.setdefault(outcome, now.outcome.reason)
            else:
                self.unscored[outcome] += 1
