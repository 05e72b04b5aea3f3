"""What a record holds to choose from: of each scored rollout only its score, and where its line is.

The record is read twice: here quickly, and then rollout by rollout, whole, as they are exported. So memory is one
group, and a few words for each rollout.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from orchestrator.engine.group import GroupPolicy
from orchestrator.rescoring.grouping import drawn
from orchestrator.rules.advantages import Leaf
from orchestrator.run.excerpts import CountedBadTask, read_counted
from orchestrator.run.lines import end_now, texts
from orchestrator.run.trees import leaf

MOST_NAMED = 20  # unreadable lines; all are counted


class LeftOut(StrEnum):
    """Why a line of the record is in no file, in the order of the questions. `SIDE`: lines of those that are."""

    UNREADABLE = "of an unreadable line"
    BAD_TASK = "of a task that could not be rolled out"
    NO_SCORE = "without a score"
    SUPERSEDED = "superseded by another draw of the same place"
    ODD = "without another one of the group to be a pair with"
    UNSOLVED = "not solved"
    BELOW = "below the threshold"
    NOT_BEST = "not among the best of the group"
    NO_LINE = "without a conversation"
    RETOKENIZED = "without exact token ids"
    UNTRAINED = "masked by the run's settings"
    TOO_LONG = "too long"
    SIDE = "side lines without exact token ids, or too long"
    ALIKE = "in no pair of a solved one and one that is not"
    NO_PAIR = "in no pair with the margin"
    OTHER_PROMPT = "in a pair whose prompts differ"


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored attempt, `leaf` in its group. `solved`: what its scorer says. `offset`: where its line begins."""

    leaf: Leaf
    solved: bool
    offset: int

    @property
    def score(self) -> float:
        return self.leaf.score


@dataclass(slots=True)
class Survey:
    """`groups`: scored attempts by group and place, in the order they were made. `sizes`: how many rollouts groups
    were to have, as far as the record says it. `unscored`: where the lines of attempts without a score begin.
    `sha256`: of all that was read.

    `unreadable`: the first lines that are no attempt and no bad task, or whose ids do not fit, and why.
    """

    lines: int = 0
    size_bytes: int = 0
    sha256: str = ""
    groups: dict[int, dict[int, list[Scored]]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    unscored: list[int] = field(default_factory=list)
    left_out: Counter[LeftOut] = field(default_factory=Counter)
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, record: Path, *, growing: bool) -> Survey:
        """From all lines that are there now. The unfinished last one of a `growing` record is not read. Raises
        OSError."""
        survey, ids, digest = cls(), set[str](), hashlib.sha256()
        for line in texts(record, end_now(record, growing=growing)):
            survey.lines += 1
            survey.size_bytes += len(line.text)
            digest.update(line.text)
            try:
                line_counts = read_counted(line.text)
            except ValueError as error:
                survey.refuse(line.place, str(error))
                continue
            if line_counts.rollout_id in ids:
                survey.refuse(line.place, f"{line_counts.rollout_id} is there a second time")
            elif isinstance(line_counts, CountedBadTask):
                survey.left_out[LeftOut.BAD_TASK] += 1
            elif line_counts.score is None:
                survey.left_out[LeftOut.NO_SCORE] += 1
                survey.unscored.append(line.offset)
            else:
                places = survey.groups.setdefault(line_counts.group, {})
                score = line_counts.score
                end = leaf(line_counts.rollout_id, score.value, line_counts.branch)
                one = Scored(end, score.solved, line.offset)
                places.setdefault(line_counts.index, []).append(one)
                if line_counts.group_size is not None:
                    survey.sizes[line_counts.group] = line_counts.group_size
            ids.add(line_counts.rollout_id)
        survey.sha256 = digest.hexdigest()
        return survey

    def offsets(self) -> list[int]:
        """Where the lines of all attempts begin, with and without a score."""
        scored = (one.offset for places in self.groups.values() for draws in places.values() for one in draws)
        return sorted([*scored, *self.unscored])

    def refuse(self, place: str, reason: str) -> None:
        """Counts a line that cannot be read."""
        self.left_out[LeftOut.UNREADABLE] += 1
        if len(self.unreadable) < MOST_NAMED:
            self.unreadable.append((place, reason))

    def drawn_groups(self, policy: GroupPolicy, group_size: int) -> Iterator[list[Scored]]:
        """The members of each group, by the groups' numbers and the places; what they supersede is counted.
        `group_size`: of groups whose record does not say it."""
        for number in sorted(self.groups):
            places = self.groups[number]
            members = drawn(places, policy.enough(self.sizes.get(number, group_size)))
            self.left_out[LeftOut.SUPERSEDED] += sum(map(len, places.values())) - len(members)
            yield members
