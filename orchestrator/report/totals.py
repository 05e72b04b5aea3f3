"""Figures of a whole run, counted while it is read: exact however long it is, in memory that does not grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from orchestrator.rules.estimates import wilson
from orchestrator.rules.retries import cause
from orchestrator.run.lenient import count, mapping, number, numbers, objects
from orchestrator.types import FailedName, is_solved

Row = dict[str, Any]
MOST_NAMES = 200  # of one kind; what has further names is counted under OTHERS
OTHERS = "others"
MOST_ERRORS = 12  # kinds of them that are shown
BINS = 20  # of scores from 0 to 1
UNGRADABLE = "not gradable, scored 0"
PARTS = ("level", "source")


@dataclass(slots=True)
class Reason:
    """How often something happened, and the first reason that was given for it."""

    times: int = 0
    reason: str = ""

    def add(self, by: int, reason: str) -> None:
        self.times += by
        self.reason = self.reason or reason


@dataclass(slots=True)
class Met:
    """In how many steps of how many rollouts an error was met, and its first text."""

    steps: int = 0
    rollouts: int = 0
    example: str = ""

    def add(self, by: int, steps: int, example: str) -> None:
        self.rollouts += by
        self.steps += by * steps
        self.example = self.example or example


@dataclass(slots=True)
class Totals:
    """Counts of attempts come from rollouts.jsonl, counts of written groups from the groups file.

    `tokens`: sampled by all attempts; `scored_tokens`: by scored ones. `repeated`: requests for completions.
    `began`, `ended`: Unix seconds. `not_scored`: by outcome, with the first reason; `drawn_again`: by the
    outcome that was drawn again. `solved_as`: of the solved ones, by outcome. `errors`: of steps, by their
    kind. `scores`: for each bin how many solved their task and how many did not. `parts`: for each level and
    source how many of how many solved. `mixed` and `divided`: written groups whose members differ in score and
    in being solved; `all_right`, `all_wrong`: those in which all were solved, and none. `trained_tokens`,
    `untrained_tokens`: sampled in written groups, by whether the groups file has their line.
    `continued`: how often a lost sandbox' rollout went on, with `kept_tokens`; `not_continued`: why it could not.
    `outside`: requests of sandboxes and services beside them, as `outside_counts` has them.
    `trained`: rollouts of written groups. `cost`: of all attempts; None: no prices.
    """

    attempts: int = 0
    scored: int = 0
    solved: int = 0
    score: float = 0.0
    tokens: int = 0
    scored_tokens: int = 0
    repeated: int = 0
    began: float | None = None
    ended: float | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    solved_as: Counter[str] = field(default_factory=Counter)
    errors: dict[str, Met] = field(default_factory=dict)
    token_sources: Counter[str] = field(default_factory=Counter)
    not_scored: dict[str, Reason] = field(default_factory=dict)
    drawn_again: dict[str, Reason] = field(default_factory=dict)
    scores: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(BINS)])
    parts: dict[str, dict[str, list[int]]] = field(default_factory=lambda: {part: {} for part in PARTS})
    bad_tasks: int = 0
    groups: int = 0
    written: int = 0
    mixed: int = 0
    divided: int = 0
    all_right: int = 0
    all_wrong: int = 0
    trained_tokens: int = 0
    untrained_tokens: int = 0
    trained: int = 0
    cost: float | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    continued: int = 0
    kept_tokens: int = 0
    not_continued: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)

    def count(self, row: Row, group: Row, by: int = 1) -> None:
        """Counts an attempt of `group`; with -1 no longer, as a later line took its place."""
        self.attempts += by
        self.outcomes[_name(row["outcome"], self.outcomes)] += by
        self.solved_as[_name(row["outcome"], self.solved_as)] += by * row["solved"]
        for error, (times, example) in row["errors"].items():
            self.errors.setdefault(_name(error, self.errors), Met()).add(by, times, example)
        self.token_sources[_name(row["token_source"], self.token_sources)] += by
        self.tokens += by * row["tokens"] * row["counts"]
        for turn, tokens, _, refused in row.get("continued", ()) if row["counts"] else ():
            self.continued += by * (turn > 0)
            self.kept_tokens += by * tokens
            if refused:
                self.not_continued[_name(cause(refused), self.not_continued)] += by
        self.repeated += by * row["retries"] * row["counts"]
        for name, times in row["outside"].items():
            self.outside[name] += by * times * row["counts"]
        if row["cost"] is not None:
            self.cost = (self.cost or 0.0) + by * row["cost"] * row["counts"]
        if (start := row["started_at"]) is not None:
            end = start + (row["duration_s"] or 0.0)
            self.began = start if self.began is None else min(self.began, start)
            self.ended = end if self.ended is None else max(self.ended, end)
        if row["score"] is None or row["unscorable"]:
            why = UNGRADABLE if row["unscorable"] else row["outcome"]
            self.not_scored.setdefault(_name(why, self.not_scored), Reason()).add(by, row["reason"])
        if row["score"] is not None:
            self._count_score(row, group, by)

    def _count_score(self, row: Row, group: Row, by: int) -> None:
        self.scored += by
        self.solved += by * row["solved"]
        self.score += by * row["score"]
        self.scored_tokens += by * row["tokens"]
        self.scores[max(0, min(BINS - 1, int(row["score"] * BINS)))][not row["solved"]] += by
        for part, shares in self.parts.items():
            if group[part]:
                solved = shares.setdefault(_name(group[part], shares), [0, 0])
                solved[0] += by * row["solved"]
                solved[1] += by

    def count_draw(self, before: Row) -> None:
        """Counts that a rollout was drawn again after the attempt `before`."""
        why = before["reason"] if before["score"] is None else ""
        self.drawn_again.setdefault(_name(before["outcome"], self.drawn_again), Reason()).add(1, why)

    def count_written(self, line: Row) -> None:
        """Counts a line of the groups file, unless it has the side lines of a group that is counted already."""
        members = objects(line.get("overrides"))
        if all(map(is_aside, members)):
            return
        column = line.get("scores")
        scores = map(number, column if isinstance(column, list) else [])
        parts = (numbers(mapping(one.get("score_parts"))) for one in members)
        scored = [(score, part) for score, part in zip(scores, parts, strict=False) if score is not None]
        self.written += 1
        self.mixed += len({score for score, _ in scored}) > 1
        solved = {is_solved(score, part) for score, part in scored}
        self.divided += len(solved) > 1
        self.all_right += solved == {True}
        self.all_wrong += solved == {False}
        self.trained += sum(not is_aside(one) for one in members)
        for one in members:
            sampled, missing = count(one.get("completion_tokens")), number(one.get("untrained_share")) or 0.0
            untrained = round(sampled * max(0.0, min(1.0, missing)))
            self.trained_tokens += sampled - untrained
            self.untrained_tokens += untrained

    def count_drop(self, reason: str, by: int = 1) -> None:
        """Counts a group that was not written; with -1 no longer, as it was tried again."""
        self.dropped[_name(reason, self.dropped)] += by

    def leave_out_texts(self) -> None:
        """Reasons and errors stay as counts."""
        for reason in (*self.not_scored.values(), *self.drawn_again.values()):
            reason.reason = ""
        for met in self.errors.values():
            met.example = ""
        self.dropped = Counter({"left out here": self.dropped.total()})
        self.not_continued = Counter({"left out here": self.not_continued.total()})

    def kept(self) -> dict[str, Any]:
        """For JSON."""
        return {it.name: getattr(self, it.name) for it in fields(self)}

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> Totals:
        """The inverse of `kept`."""
        kinds = {"errors": Met, "not_scored": Reason, "drawn_again": Reason}
        counters = ("outcomes", "solved_as", "token_sources", "dropped", "not_continued", "outside")
        named = {name: {key: kind(**one) for key, one in kept[name].items()} for name, kind in kinds.items()}
        return cls(**{**kept, **named, **{name: Counter(kept[name]) for name in counters}})

    def shown(self) -> dict[str, Any]:
        """What the page shows of it."""
        return {
            **{name: getattr(self, name) for name in ("attempts", "scored", "solved", "score", "scored_tokens")},
            **{name: getattr(self, name) for name in ("repeated", "began", "ended", "scores", "bad_tasks")},
            **{name: getattr(self, name) for name in ("cost", "trained", "continued", "kept_tokens")},
            "not_continued": (+self.not_continued).most_common(),
            "outside": +self.outside,
            **{name: getattr(self, name) for name in ("groups", "written", "mixed", "divided")},
            **{name: getattr(self, name) for name in ("all_right", "all_wrong")},
            # Rollouts of one task are not independent: the n is that of groups.
            "interval": wilson(self.solved / self.scored, min(self.scored, self.groups)) if self.scored else None,
            "outcomes": [(name, times, self.solved_as[name]) for name, times in (+self.outcomes).most_common()],
            "errors": self._errors(),
            "not_scored": _most(self.not_scored),
            "drawn_again": _most(self.drawn_again),
            "parts": {part: dict(sorted(shares.items())) for part, shares in self.parts.items()},
            "dropped": (+self.dropped).most_common(),
        }

    def _errors(self) -> list[tuple[str, int, int, str]]:
        """(kind, steps, rollouts, an example), the commonest first."""
        ranked = sorted(self.errors.items(), key=lambda it: (-it[1].rollouts, -it[1].steps))
        return [
            (name, met.steps, met.rollouts, met.example) for name, met in ranked[:MOST_ERRORS] if met.rollouts > 0
        ]


def is_aside(override: Row) -> bool:
    """Whether this member of a group is a side line of its rollout."""
    return (override.get("segment") or 0) != (override.get("main_segment") or 0)


def outcome_counts(totals: Totals) -> Counter[str]:
    """Attempts and bad tasks by outcome."""
    return +totals.outcomes + Counter({FailedName.BAD_TASK: totals.bad_tasks})


def _most(reasons: dict[str, Reason]) -> list[tuple[str, int, str]]:
    ranked = sorted(reasons.items(), key=lambda it: -it[1].times)
    return [(name, one.times, one.reason) for name, one in ranked if one.times]


def _name(name: str, names: dict[str, Any]) -> str:
    return name if name in names or len(names) < MOST_NAMES else OTHERS
