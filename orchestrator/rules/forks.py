"""Where rollouts branch from one that has ended: what `env.branch` says. Pure.

A tree is one rollout, its trunk, and others that are brought to a turn of it and sample that turn anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import ConfigError
from orchestrator.types import Record

FIRST_TURN = 2  # a branch at turn 1 would be a rollout of its own
_COUNT = r"[1-9][0-9]{0,3}"
_RULE = re.compile(
    rf"(?:(turns):({_COUNT}(?:,{_COUNT})*)|(entropy):({_COUNT})|(python):([A-Za-z_][\w.]*:[A-Za-z_][\w.]*))"
)
_WORD = re.compile(rf"(width):({_COUNT})|(trunk):(trained|masked)")


@dataclass(frozen=True, slots=True)
class Fork:
    """`width` branches that sample this turn anew, beside the trunk's own. Turns are completions, from 1 on."""

    turn: int
    width: int


@dataclass(frozen=True, slots=True)
class BranchRule:
    """`turns`: at these turns. `entropy`: at the `top` turns whose tokens were least certain. `python`: where the
    operator's function says. `trunk_masked`: what branches share with their trunk is not trained."""

    kind: Literal["turns", "entropy", "python"]
    width: int = 0  # python: the function says it
    turns: tuple[int, ...] = ()
    top: int = 0
    function: str = ""  # python:MODULE:FUNCTION
    trunk_masked: bool = False

    @classmethod
    def parse(cls, text: str) -> BranchRule:
        """Raises ValueError, which says what is wrong."""
        first, *others = text.split() or [""]
        if (match := _RULE.fullmatch(first)) is None:
            raise ValueError(f"{first!r} is not turns:K,K, entropy:TOP or python:MODULE:FUNCTION")
        words: dict[str, str] = {}
        for word in others:
            if (found := _WORD.fullmatch(word)) is None:
                raise ValueError(f"{word!r} is not width:W, trunk:trained or trunk:masked")
            name, value = (part for part in found.groups() if part is not None)
            if name in words:
                raise ValueError(f"{name} is given twice")
            words[name] = value
        kind, value = (part for part in match.groups() if part is not None)
        masked = words.get("trunk") == "masked"
        if kind == "python":
            if "width" in words:
                raise ValueError("a function says how wide its forks are: leave width out")
            return cls("python", function=first, trunk_masked=masked)
        if "width" not in words:
            raise ValueError(f"{kind} needs width:W")
        width = int(words["width"])
        if kind == "entropy":
            return cls("entropy", width, top=int(value), trunk_masked=masked)
        turns = tuple(sorted(map(int, value.split(","))))
        if len(set(turns)) < len(turns) or turns[0] < FIRST_TURN:
            raise ValueError(f"turns are different numbers from {FIRST_TURN} on")
        return cls("turns", width, turns, trunk_masked=masked)

    @classmethod
    def masks_trunks(cls, env: Mapping[str, object]) -> bool:
        """Whether these settings of a run mask what branches share with their trunk. Raises ValueError."""
        branch = env.get("branch")
        return branch is not None and cls.parse(str(branch)).trunk_masked

    def tree_size(self, group_size: int) -> int:
        """How many rollouts a tree has, its trunk among them."""
        if self.kind == "python":
            return group_size
        return 1 + (len(self.turns) or self.top) * self.width

    def demand_size(self, group_size: int, name: str = "env.group_size") -> None:
        """Raises ConfigError unless trees fill a group."""
        tree = max(2, self.tree_size(group_size))
        if group_size % tree:
            fewer = group_size // tree * tree
            sizes = f"{fewer} or {fewer + tree}" if fewer else str(tree)
            raise ConfigError(f"env.branch: {name} {group_size} is not filled by trees of {tree}; set {sizes}")

    def forks(self, record: Record) -> tuple[Fork, ...]:
        """Of a trunk, but by the operator's function. Raises ConfigError where no log-prob is known."""
        if self.kind == "turns":
            return tuple(Fork(turn, self.width) for turn in self.turns if turn <= len(record.turns))
        return tuple(Fork(turn, self.width) for turn in least_certain(record, self.top))


def least_certain(record: Record, top: int) -> tuple[int, ...]:
    """The turns from the second on with the highest mean of negative log-probs; of equal ones the earlier. Raises
    ConfigError where the endpoint tells none."""
    surprise = {}
    for turn, one in enumerate(record.turns, 1):
        if turn >= FIRST_TURN and (logprobs := one.completion.logprobs_T):
            surprise[turn] = -sum(logprobs) / len(logprobs)
    if not surprise and any(one.completion.logprobs_T is None for one in record.turns[1:]):
        raise ConfigError("env.branch: entropy needs log-probs, and the endpoint tells none; use turns:K")
    return tuple(sorted(sorted(surprise, key=lambda turn: -surprise[turn])[:top]))


def forks_of(answer: object, turns: int, most: int) -> tuple[Fork, ...]:
    """What the operator's function returned for a trunk of so many turns; at most `most` branches. Raises
    ValueError, which says what is wrong with it."""
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise ValueError(f"{ascii(answer)[:80]} is no list of (turn, width)")
    forks = []
    for pair in answer:
        if not isinstance(pair, Sequence) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise ValueError(f"{ascii(pair)[:80]} is not (turn, width), two whole numbers")
        fork = Fork(*pair)
        if not FIRST_TURN <= fork.turn <= turns or fork.width < 1:
            raise ValueError(f"{tuple(pair)} is no fork: turns go from {FIRST_TURN} to {turns}, widths from 1 on")
        forks.append(fork)
    if len({fork.turn for fork in forks}) < len(forks):
        raise ValueError("a turn is named twice")
    if (total := sum(fork.width for fork in forks)) > most:
        raise ValueError(f"{total} branches, and the group has room for {most}")
    return tuple(sorted(forks, key=lambda fork: fork.turn))
