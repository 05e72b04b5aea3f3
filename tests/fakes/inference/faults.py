"""What may go wrong with an answer, and when it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.fakes.inference.script import Call

Kind = Literal[
    # instead of an answer
    "400", "401", "402", "403", "404", "quota",
    "429", "500", "502", "503", "504", "context_length", "reset", "hang", "garbage",
    # a late answer: `after_s` before its first byte
    "slow",
    # an answer that is not as it should be
    "empty_choices", "null_content", "missing_logprobs", "fewer_logprobs", "foreign_ids", "nan_logprob",
    "positive_logprob", "wrong_count", "other_prompt", "cut_off",
    # a whole sample that the server will not give
    "content_filter",
    # a whole sample that ended, in the words of another service, by `word`
    "finish",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the calls it meets: all conditions that are given must hold; none given: every call.

    calls: numbers of completions. pattern: part of the task. anywhere: part of any
    message. ratio: so many of the calls, by lot.
    times: at most so often. probes: meets probe requests too (which have no number).
    """

    kind: Kind
    calls: Sequence[int] | None = None
    pattern: str | None = None
    anywhere: str | None = None
    ratio: float | None = None
    times: int | None = None
    probes: bool = False
    retry_after_s: float | None = None
    after_s: float = 0.2
    word: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in Kind.__args__:  # type: ignore[attr-defined]
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(Kind.__args__)}")  # type: ignore[attr-defined]


@dataclass(slots=True)
class FaultPlan:
    """The first fault that meets a call is the one it gets."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    _met: dict[int, int] = field(default_factory=dict)

    def meets(self, call: Call) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if self._holds(index, fault, call):
                self._met[index] = self._met.get(index, 0) + 1
                return fault
        return None

    def _holds(self, index: int, fault: Fault, call: Call) -> bool:
        if call.number is None and not fault.probes:
            return False
        if fault.times is not None and self._met.get(index, 0) >= fault.times:
            return False
        if fault.calls is not None and call.number not in fault.calls:
            return False
        if fault.pattern is not None and fault.pattern not in call.task:
            return False
        if fault.anywhere is not None and not any(fault.anywhere in m.content for m in call.messages):
            return False
        return fault.ratio is None or Random(f"{self.seed}:{index}:{call.number}").random() < fault.ratio
