"""What a run looks like while it goes on, and the table at its end.

Plain lines for logs and pipes; on a terminal `live` has a view that redraws itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

from orchestrator.text import printable
from orchestrator.types import (
    Attempt,
    BadTask,
    Failed,
    FailedName,
    Group,
    Member,
    RolloutPlan,
    Score,
    last_attempts,
)

LABEL_WIDTH = 15
TASK_WIDTH = 28
REASON_WIDTH = 200


@dataclass(slots=True)
class Tally:
    """Counts of one run. `outcomes` has every attempt once, bad tasks included."""

    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    correct: int = 0
    groups: int = 0
    dropped: int = 0
    dropped_for: Counter[str] = field(default_factory=Counter)  # the commonest failure of each; "": none broke
    last_drop: str = ""  # the task whose rollouts broke last, and how
    mixed: int = 0
    attempts: int = 0
    tokens: int = 0
    cpu_s: float = 0.0  # of those attempts of which it is known
    cpu_known: int = 0
    rollout_s: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)  # the first of each outcome that is not scored
    unscorable: int = 0  # scored 0, as grading failed on them and not on a control
    unscorable_first: str = ""
    draws: Counter[str] = field(default_factory=Counter)  # further draws, by the outcome that was drawn again
    drawn: Counter[int] = field(default_factory=Counter)  # and by group
    _failed: dict[tuple[int, int], str] = field(default_factory=dict)  # the last failure of a place in a group

    def attempt(self, result: Member | Attempt) -> None:
        """Counts one attempt."""
        attempt = result.attempt if isinstance(result, Member) else result
        record, outcome = attempt.record, str(attempt.outcome.name)
        if attempt.ungraded is not None:  # what it took is counted with its score
            return self._count(outcome, 0, None, 0.0)
        failed = isinstance(attempt.outcome, Failed)
        self._count_draw(attempt.plan.group, attempt.plan.index, outcome if failed else None)
        self._count(outcome, record.sampled_tokens, record.cpu_s, record.duration_s)
        if isinstance(attempt.outcome, Failed):
            self._count_reason(outcome, attempt.outcome.reason)
        if isinstance(result, Member):
            self._count_score(result.score)
        return None

    def earlier_attempt(self, line: Mapping[str, Any]) -> None:
        """Counts one line of rollouts.jsonl that an earlier process of the run has written."""
        if "index" not in line:
            return self.bad_task()
        if line.get("ungraded") is not None:
            return self._count(line["outcome"], 0, None, 0.0)
        self._count_draw(line["group"], line["index"], line["outcome"] if line["score"] is None else None)
        tokens = sum(completion["completion_tokens"] for completion in line["completions"])
        self._count(line["outcome"], tokens, line["cpu_s"], line["duration_s"])
        if line["score"] is None:
            self._count_reason(line["outcome"], line["reason"])
        else:
            parts = {name: float(part) for name, part in line["score_parts"].items()}
            self._count_score(Score(float(line["score"]), parts, line.get("score_evidence") or {}))
        return None

    def earlier_group(self, scores: Sequence[float]) -> None:
        """Counts one group that an earlier process of the run has written."""
        self.groups += 1
        self.mixed += len(set(scores)) > 1

    def _count(self, outcome: str, tokens: int, cpu_s: float | None, rollout_s: float) -> None:
        self.attempts += 1
        self.outcomes[outcome] += 1
        self.tokens += tokens
        if cpu_s is not None:
            self.cpu_s += cpu_s
            self.cpu_known += 1
        self.rollout_s += rollout_s

    def _count_draw(self, group: int, index: int, failure: str | None) -> None:
        """One attempt more at a place in a group; `failure`: it is not scored, and may be drawn again."""
        place = group, index
        if (before := self._failed.pop(place, None)) is not None:
            self.draws[before] += 1
            self.drawn[group] += 1
        if failure is not None:
            self._failed[place] = failure

    def _count_reason(self, outcome: str, reason: str) -> None:
        if outcome != FailedName.CANCELLED:
            self.reasons.setdefault(outcome, one_line(reason))

    def _count_score(self, score: Score) -> None:
        self.scores.append(score.value)
        self.correct += score.solved
        if score.failure:
            self.unscorable += 1
            self.unscorable_first = self.unscorable_first or one_line(score.failure)

    def bad_task(self) -> None:
        """Counts one row no task could be made of."""
        self.outcomes["bad_task"] += 1

    def group(self, group: Group) -> None:
        """Counts one group."""
        if group.dropped is not None:
            self._count_drop(group)
            return
        self.groups += 1
        self.mixed += len({m.score.value for m in group.members_G}) > 1

    def _count_drop(self, group: Group) -> None:
        self.dropped += 1
        failures = [attempt.outcome for attempt in group.attempts if isinstance(attempt.outcome, Failed)]
        names = Counter(str(failure.name) for failure in failures)
        broke = len({m.attempt.plan.index for m in group.members_G}) < len({a.plan.index for a in group.attempts})
        (name, _), *_ = names.most_common(1) if names and broke else [("", 0)]
        self.dropped_for[name] += 1
        if name:
            reason = next(failure.reason for failure in reversed(failures) if failure.name == name)
            self.last_drop = f"{printable(group.task.task_id)[:TASK_WIDTH]}: {printable(reason)[:REASON_WIDTH]}"

    @property
    def mean_score(self) -> float:
        """Of all that were scored; 0 where none was."""
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


class PlainProgress:
    """One line per group, for logs and pipes."""

    def __init__(self, wanted: int | None, tally: Tally, stream: TextIO | None = None) -> None:
        self.wanted = wanted
        self.tally = tally
        self._stream = stream or sys.stderr

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def say(self, text: str) -> None:
        """One printable line."""
        print(printable(text), file=self._stream, flush=True)

    def started(self, plan: RolloutPlan) -> None:
        """A rollout gets a sandbox."""

    def attempt(self, result: Member | Attempt) -> None:
        """An attempt is over."""

    def group(self, group: Group) -> None:
        """A group came to its end; it is counted already."""
        scores = " ".join(f"{m.score.value:.2f}" for m in group.members_G)
        what = f"{scores}{lost(group)}" if group.dropped is None else f"dropped, {one_line(group.dropped)}"
        self.say(f"{self.heading(group)}  {what}")

    def heading(self, group: Group) -> str:
        """When it ended, which one of how many, and its task."""
        done = str(self.tally.groups + self.tally.dropped)
        if self.wanted is not None:
            done = f"{done:>{len(str(self.wanted))}}/{self.wanted}"
        task = printable(group.task.task_id)
        task = task if len(task) <= TASK_WIDTH else task[: TASK_WIDTH - 1] + "…"
        return f"[{self.tally.wall_s:7.1f} s] group {done}  {task:<{TASK_WIDTH}}"

    def bad_task(self, task: BadTask) -> None:
        """A row no task could be made of."""
        self.say(f"bad task {task.task_id[:80]}: {task.reason}")


def open_progress(wanted: int | None, tally: Tally, stream: TextIO | None = None) -> PlainProgress:
    """The view for where `stream` goes, as a context manager."""
    stream = stream or sys.stderr
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainProgress(wanted, tally, stream)
    from orchestrator.terminal.live import LiveProgress

    return LiveProgress(wanted, tally, stream)


def dropped_text(tally: Tally, way_on: str) -> str:
    """How many groups were dropped and why; `way_on`: the command that tries those again whose rollouts broke."""
    why = ", ".join(
        f"{n} by {name}" if name else f"{n} of equal scores" for name, n in tally.dropped_for.most_common()
    )
    text = f"{tally.dropped} group{'s' * (tally.dropped != 1)}: {why}"
    return f"{text}; the last, {tally.last_drop}; tried again by `{way_on}`" if tally.last_drop else text


def outcomes_text(tally: Tally) -> str:
    """Each outcome with its count and share, the commonest first."""
    total = sum(tally.outcomes.values())
    return ", ".join(f"{name} {n} ({share(n, total)})" for name, n in tally.outcomes.most_common()) or "none"


def draws_text(tally: Tally) -> str:
    """How many further draws each outcome bought, and whether one group had most of them."""
    each = ", ".join(f"{name} {n}" for name, n in tally.draws.most_common())
    (group, most), *_ = tally.drawn.most_common(1)
    groups = len(tally.drawn)
    return f"{each}; in {groups} group{'' if groups == 1 else 's'}, at most {most} in one (group {group})"


def share(part: int, whole: int) -> str:
    """A percentage; never 0 % of something, never 100 % of less."""
    percent = 100 * part / whole if whole else 0.0
    rounded = round(percent)
    if part and not rounded:
        return "<1%"
    return ">99%" if part < whole and rounded == 100 else f"{rounded}%"


def lost(group: Group) -> str:
    """Of a group that was kept without some of its rollouts: how many broke, and the first reason."""
    broken = [a.outcome for a in last_attempts(group.attempts) if isinstance(a.outcome, Failed)]
    return f" and {len(broken)} {broken[0].name}: {one_line(broken[0].reason)}" if broken else ""


def reason_rows(tally: Tally) -> list[tuple[str, str]]:
    """Why rollouts were not scored, or scored 0 without a word of the scorer's: the first reason of each kind. And
    how many draws that bought."""
    rows = [(outcome, f"{tally.outcomes[outcome]}, the first: {why}") for outcome, why in tally.reasons.items()]
    if tally.unscorable:
        rows.append(("not gradable", f"{tally.unscorable} scored 0, the first: {tally.unscorable_first}"))
    if tally.draws:
        rows.append(("drawn again", draws_text(tally)))
    return rows


def closing_table(
    tally: Tally, rows: Sequence[tuple[str, object]], stream: TextIO | None = None, wanted: int | None = None
) -> None:
    """Counts, scores, wall and CPU; then `rows`, where everything was written first among them."""
    of = f" of {wanted}" if wanted else ""
    table: list[tuple[str, object]] = [
        ("groups", f"{tally.groups}{of} written, {tally.mixed} with mixed scores, {tally.dropped} dropped"),
        ("outcomes", outcomes_text(tally)),
    ]
    if tally.scores:
        correct = f"{tally.correct} of {len(tally.scores)} correct ({share(tally.correct, len(tally.scores))})"
        table.append(("scores", f"mean {tally.mean_score:.3f}, {correct}"))
    table += reason_rows(tally)
    table.append(("tokens", f"{tally.tokens} sampled"))
    table.append(("time", f"{tally.wall_s:.1f} s{_per_rollout(tally)}"))
    stream = stream or sys.stdout
    if stream.isatty():
        print(file=stream)
    for label, text in (*table, *rows):
        print_wrapped(f"{label:<{LABEL_WIDTH}}{text}", stream, indent=LABEL_WIDTH)


def print_wrapped(text: str, stream: TextIO, *, indent: int = 0) -> None:
    """One printable line; on a terminal wrapped between words."""
    text = printable(text)
    if stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns, indent=indent)
    print(text, file=stream, flush=True)


def wrapped(text: str, width: int, *, indent: int = 0) -> str:
    """Broken between words only: paths stay whole, to be copied."""
    return textwrap.fill(
        text,
        max(width, 2 * indent + 1),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _per_rollout(tally: Tally) -> str:
    if not tally.attempts:
        return ""
    text = f"; per rollout {tally.rollout_s / tally.attempts:.2f} s from its assignment"
    return f"{text}, {tally.cpu_s / tally.cpu_known:.2f} s of CPU in its sandbox" if tally.cpu_known else text


def one_line(text: str) -> str:
    """What came from a network or a sandbox, for a terminal: printable, on one line, shortened."""
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= REASON_WIDTH else plain[: REASON_WIDTH - 1] + "…"
