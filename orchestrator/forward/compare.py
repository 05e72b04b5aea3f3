"""Recomputed log-probs against recorded ones: figures by place, controls, and what they say. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.forward.lines import Place, TrainedLine

TURNS_APART = 10  # later turns are counted together
LEAST_TOKENS = 100  # of a row that the limits apply to: a few tokens have any mean
BETTER = 4  # a control this many times nearer to the record is how it came about, whatever the limits allow
K3_TOKENS = 1000  # of a row that the limit on k3 applies to: among fewer, one unlikely token decides it


class Precision(StrEnum):
    """How the weights are stored. The server's arithmetic follows it."""

    FULL = "32 bits"
    HALF = "16 bits"
    QUANTISED = "quantised"


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a right record may be from the forward pass, in nats. `mean`: mean absolute difference; `k3`: the
    estimate of the KL divergence."""

    mean: float
    k3: float


# Measured, see docs/runs.md: right records stay at half of these or less, every planted fault is above.
LIMITS = {
    Precision.FULL: Limits(0.005, 0.0002),
    Precision.HALF: Limits(0.1, 0.006),
    Precision.QUANTISED: Limits(0.03, 0.002),
}


ROUNDED_TOKENS = 200  # so many show how far the rounding of a server's arithmetic goes
OVER_ROUNDING = 2.0  # a right record differs by about what the rounding makes, never by twice that


def widened(limits: Limits, rounding: Figures) -> Limits:
    """The limits for weights on which rounding makes a difference of these figures: small models are sensitive."""
    if not rounding.count:
        return limits
    return Limits(max(limits.mean, OVER_ROUNDING * rounding.mean), max(limits.k3, OVER_ROUNDING * rounding.k3))


class Control(StrEnum):
    """A wrong way to read the same data. A record that fits one of them is wrong in just that way."""

    TOKEN_BEFORE = "the log-probs of the token before"
    TOKEN_BEHIND = "the log-probs of the token behind"
    LABEL_BEFORE = "the log-probs that the right rows give the token before"
    LABEL_BEHIND = "the log-probs that the right rows give the token behind"
    ROW_BEFORE = "the log-probs that the rows of the place before give the token"
    ROW_BEHIND = "the log-probs that the rows of the place behind give the token"
    TEMPERED = "log-probs at the sampling temperature (vLLM: start it with --logprobs-mode raw_logprobs)"


SHIFTED_LOGPROBS = (Control.TOKEN_BEFORE, Control.TOKEN_BEHIND)
SHIFTED_LABELS = (Control.LABEL_BEFORE, Control.LABEL_BEHIND, Control.ROW_BEFORE, Control.ROW_BEHIND)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Log-probs of one line's trained places by the forward pass, all from the row that predicts the place.

    `own_P`: of the token there. `before_P`, `behind_P`: of the tokens at the places before and behind it.
    `tempered_P`: of the token there, at the sampling temperature. NaN: there is none.
    """

    own_P: Sequence[float]
    before_P: Sequence[float]
    behind_P: Sequence[float]
    tempered_P: Sequence[float]


@dataclass(slots=True)
class Figures:
    """Differences, recomputed less recorded, one for each token."""

    differences: array[float] = field(default_factory=lambda: array("f"))

    def add(self, recomputed: float, recorded: float) -> None:
        """Counts a token. A log-prob that is NaN counts as a probability of 0."""
        difference = recomputed - recorded
        self.differences.append(-math.inf if math.isnan(difference) else difference)

    @property
    def count(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        """The mean absolute difference; NaN without tokens."""
        return math.fsum(map(abs, self.differences)) / self.count if self.count else math.nan

    @property
    def p99(self) -> float:
        """99 % of the absolute differences are at most this; NaN without tokens."""
        ranked = sorted(map(abs, self.differences))
        return ranked[max(0, math.ceil(0.99 * len(ranked)) - 1)] if ranked else math.nan

    @property
    def k3(self) -> float:
        """Schulman's estimate of KL(recorded || recomputed) from samples: the mean of r - 1 - log r."""
        terms = (math.expm1(min(d, 700.0)) - d for d in self.differences)  # exp(710) is no float
        return math.fsum(terms) / self.count if self.count else math.nan

    def within(self, limits: Limits) -> bool:
        """Whether the mean, and k3 of many tokens, are at most the limits. Not without tokens."""
        return self.mean <= limits.mean and (self.count < K3_TOKENS or self.k3 <= limits.k3)


@dataclass(slots=True)
class Comparison:
    """All figures of one forward pass."""

    limits: Limits
    all: Figures = field(default_factory=Figures)
    places: dict[Place, Figures] = field(default_factory=dict)
    turns: dict[int, Figures] = field(default_factory=dict)
    versions: dict[str, Figures] = field(default_factory=dict)
    controls: dict[Control, Figures] = field(default_factory=dict)
    lines: int = 0

    def add(self, line: TrainedLine, again: Recomputed) -> None:
        """Counts the tokens of one line."""
        self.lines += 1
        places = line.places_P
        for at, (place, recorded, own) in enumerate(zip(places, line.logprobs_P, again.own_P, strict=True)):
            parts: list[Figures] = [
                self.all,
                self.places.setdefault(line.kinds_P[at], Figures()),
                self.turns.setdefault(min(line.turns_P[at], TURNS_APART), Figures()),
            ]
            if (version := line.versions_P[at]) is not None:
                parts.append(self.versions.setdefault(version, Figures()))
            for part in parts:
                part.add(own, recorded)
            if at and places[at - 1] == place - 1:  # of one completion
                before = line.logprobs_P[at - 1]
                self._control(Control.TOKEN_BEFORE, again.own_P[at - 1], recorded)
                self._control(Control.TOKEN_BEHIND, own, before)
                self._control(Control.LABEL_BEFORE, again.before_P[at], recorded)
                self._control(Control.LABEL_BEHIND, again.behind_P[at - 1], before)
                self._control(Control.ROW_BEFORE, again.behind_P[at - 1], recorded)
                self._control(Control.ROW_BEHIND, again.before_P[at], before)
            if line.temperature != 1.0:
                self._control(Control.TEMPERED, again.tempered_P[at], recorded)

    def _control(self, control: Control, recomputed: float, recorded: float) -> None:
        if not math.isnan(recomputed):
            self.controls.setdefault(control, Figures()).add(recomputed, recorded)

    def rows(self) -> Iterator[tuple[str, Figures]]:
        """The rows that the limits apply to, with a name, the whole first."""
        yield "all trained tokens", self.all
        yield from ((str(place), self.places[place]) for place in Place if place in self.places)
        for turn in sorted(self.turns):
            yield f"turn {turn}{' and later' if turn == TURNS_APART else ''}", self.turns[turn]
        if len(self.versions) > 1:
            yield from ((f"policy version {name}", self.versions[name]) for name in sorted(self.versions))

    def above(self) -> list[str]:
        """Names of the rows above the limits. Rows of few tokens do not count, but for the whole."""
        return [
            name
            for name, figures in self.rows()
            if (figures is self.all or figures.count >= LEAST_TOKENS) and not figures.within(self.limits)
        ]

    def better_reading(self) -> Control | None:
        """The control that comes much nearer to the record than the right reading; None: none does. Where the
        policy is sure of every token, a shift by one is a small difference."""
        nearer = {
            control: figures.mean for control, figures in self.controls.items() if figures.count >= LEAST_TOKENS
        }
        best = min(nearer, key=nearer.__getitem__, default=None)
        rounding = LIMITS[Precision.FULL].mean
        return best if best and self.all.mean > max(BETTER * nearer[best], rounding) else None

    @property
    def is_right(self) -> bool:
        """Whether the record is within the limits, and no wrong reading explains it better."""
        return not self.above() and self.better_reading() is None

    def nearest(self, controls: Iterable[Control]) -> Figures | None:
        """The figures of that control that comes nearest to the record; None if no token has one."""
        figures = [self.controls[control] for control in controls if control in self.controls]
        return min(figures, key=lambda figures: figures.mean, default=None)

    def says(self) -> str:
        """What the figures say, in one sentence."""
        wrong = self.above()
        fitting = [control for control, figures in self.controls.items() if figures.within(self.limits)]
        shifted = self.nearest(SHIFTED_LOGPROBS)
        if (better := self.better_reading()) is not None:
            return f"recorded are {better}"
        if not wrong:
            right = "the recorded log-probs are this model's"
            return (
                f"{right}, as far as these tokens can tell: {fitting[0]} would pass as well" if fitting else right
            )
        if fitting:
            return f"recorded are {min(fitting, key=lambda control: self.controls[control].mean)}"
        versions = [name for name, figures in self.versions.items() if figures.within(self.limits)]
        if versions and len(self.versions) > 1:
            return f"the model is policy version {' and '.join(sorted(versions))}; other versions sampled the rest"
        if self.all.within(self.limits):
            return f"together the tokens are within the limits, but not at: {', '.join(wrong)}"
        if shifted is not None and self.all.mean > shifted.mean / 2:
            return "the record fits this model no better than shifted by one: another model sampled it"
        return (
            "near, but not these weights: another version of them, an adapter that is missing, stale or merged in "
            "another way, another quantisation, or a server that went on with the prefix cache of other weights"
        )
