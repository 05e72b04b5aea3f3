"""Counts of one run, for its progress and its closing table."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.rules.observer import Listener
from orchestrator.rules.retries import cause
from orchestrator.rules.text import LINE_CHARS, one_line, printable
from orchestrator.run.excerpts import Counted, CountedBadTask, WrittenGroup, read_counted
from orchestrator.run.groups import sampled_in, untrained_tokens
from orchestrator.run.lenient import lines_from
from orchestrator.run.prices import Prices
from orchestrator.types import Attempt, BadTask, Failed, FailedName, Group, Member

TASK_CHARS = 28  # of a task's id, where it is shown
# Of groups in which no rollout broke: a part of the reason, and the reason in short.
_UNWANTED = {"have the same score": "of equal scores", "policy versions behind": "too far behind"}


@dataclass(slots=True)
class Tally(Listener):
    """Counts of one run. `outcomes` has every attempt once, bad tasks included. `all_segments`: whether the groups
    file has side lines."""

    prices: Prices | None = None  # None: nothing is known of them
    all_segments: bool = False
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    correct: int = 0
    groups: int = 0
    dropped: int = 0
    dropped_for: Counter[str] = field(default_factory=Counter)  # by reason: `by llm_error`, `of equal scores` …
    last_drop: str = ""  # the task whose rollouts broke last, and how
    mixed: int = 0
    attempts: int = 0
    tokens: int = 0
    cost: float = 0.0  # of completions and requests, where prices are known
    trained: int = 0  # rollouts of written groups
    trained_tokens: int = 0  # sampled in their lines that the groups file has
    untrained_tokens: int = 0  # and in the others
    cpu_s: float = 0.0  # of the attempts for which it is known
    cpu_known: int = 0
    rollout_s: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)  # the first reason of each outcome that is not scored
    unscorable: int = 0  # rollouts scored 0, as grading failed on them and not on a control
    unscorable_first: str = ""
    refused: int = 0  # rollouts of programs with requests that were refused after a completion
    refused_first: str = ""
    crossing_counts: Counter[str] = field(default_factory=Counter)  # as `count_crossings` counts
    continued: int = 0  # how often a sandbox was lost and its rollout went on
    kept_tokens: int = 0  # that were not sampled again for it
    not_continued: Counter[str] = field(default_factory=Counter)  # by the cause
    draws: Counter[str] = field(default_factory=Counter)  # further draws, by the outcome that was drawn again
    drawn: Counter[int] = field(default_factory=Counter)  # and by group
    first_turns: Counter[int] = field(default_factory=Counter)  # scored rollouts, by the first turn of their own
    ungraded: set[tuple[int, int]] = field(default_factory=set)  # rollouts without their score: group and index
    _failed: dict[tuple[int, int], str] = field(default_factory=dict)  # the last failure of a place in a group

    @classmethod
    def read(cls, rollouts: Path, prices: Prices | None) -> Tally:
        """Of a rollouts.jsonl. A line that this version cannot read is not counted."""
        tally = cls(prices)
        for line in lines_from(rollouts):
            with suppress(ValueError):
                tally.earlier_attempt(read_counted(line.text))
        return tally

    def attempt(self, result: Member | Attempt) -> None:
        """Counts one attempt."""
        self.earlier_attempt(Counted.of(result))

    def earlier_attempt(self, line: Counted | CountedBadTask) -> None:
        """Counts one line of rollouts.jsonl, such as an earlier process of the run has written."""
        if isinstance(line, CountedBadTask):
            return self.bad_task()
        self.attempts += 1
        self.outcomes[line.outcome] += 1
        place = line.group, line.index
        if place not in self.ungraded:
            self._count_use(line)
        if line.ungraded:
            self.ungraded.add(place)
            return None
        self.ungraded.discard(place)  # the same rollout, now graded
        if (before := self._failed.pop(place, None)) is not None:
            self.draws[before] += 1
            self.drawn[line.group] += 1
        if line.score is None:
            self._failed[place] = line.outcome
            if line.outcome != FailedName.CANCELLED:
                self.reasons.setdefault(line.outcome, one_line(line.reason))
            return None
        self.scores.append(line.score.value)
        self.correct += line.score.solved
        self.first_turns[line.begun] += 1
        if line.score.failure:
            self.unscorable += 1
            self.unscorable_first = self.unscorable_first or one_line(line.score.failure)
        return None

    def _count_use(self, line: Counted) -> None:
        """Counts what an attempt took. It took that whether or not it was graded."""
        self.tokens += line.sampled_tokens
        self.crossing_counts += line.crossing_counts
        for one in line.continued:
            self.continued += one.turn > 0
            self.kept_tokens += one.tokens
            if one.refused:
                self.not_continued[cause(one.refused)] += 1
        if line.refusals:
            self.refused += 1
            self.refused_first = self.refused_first or one_line(line.refusals[0])
        if self.prices is not None:
            self.cost += self.prices.cost(
                line.rollout_id, line.prompt_tokens, line.sampled_tokens, line.crossing_counts["paid"]
            )
        self.rollout_s += line.duration_s
        if line.cpu_s is not None:
            self.cpu_s += line.cpu_s
            self.cpu_known += 1

    def earlier_group(self, written: WrittenGroup) -> None:
        """Counts one group that an earlier process of the run has written."""
        self.groups += 1
        self.trained += len(written.scores)
        self.trained_tokens += written.sampled - written.untrained
        self.untrained_tokens += written.untrained
        self.mixed += len(set(written.scores)) > 1

    def bad_task(self, task: BadTask | None = None) -> None:
        """Counts one row that no task could be made of."""
        self.outcomes["bad_task"] += 1

    def group(self, group: Group) -> None:
        """Counts one group."""
        if group.dropped is not None:
            self._count_drop(group)
            return
        self.groups += 1
        self.trained += len(group.members_G)
        untrained = untrained_tokens(group, all_segments=self.all_segments)
        self.trained_tokens += sampled_in(group) - untrained
        self.untrained_tokens += untrained
        self.mixed += len({m.score.value for m in group.members_G}) > 1

    def _count_drop(self, group: Group) -> None:
        self.dropped += 1
        failures = [attempt.outcome for attempt in group.attempts if isinstance(attempt.outcome, Failed)]
        names = Counter(str(failure.name) for failure in failures)
        broke = len({m.attempt.plan.index for m in group.members_G}) < len({a.plan.index for a in group.attempts})
        (name, _), *_ = names.most_common(1) if names and broke else [("", 0)]
        reason_given = group.dropped or ""
        other = next((short for part, short in _UNWANTED.items() if part in reason_given), "for other reasons")
        self.dropped_for[f"by {name}" if name else other] += 1
        if name:
            reason = next(failure.reason for failure in reversed(failures) if failure.name == name)
            self.last_drop = f"{printable(group.task.task_id)[:TASK_CHARS]}: {printable(reason)[:LINE_CHARS]}"

    @property
    def mean_score(self) -> float:
        """Mean score of the scored rollouts; 0 if there are none."""
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started
