"""Reads the rewards that a grader wrote: reward.json before reward.txt, as Harbor does."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.grading.left_behind import LeftBehind, TooLarge
from orchestrator.rules.text import one_line, valid

FILES = ("reward.json", "reward.txt")
REWARD = "reward"  # the name of the only one
_BYTES = 64 << 10
_MOST = 100  # rewards of one task
_NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class Rewards:
    """`source`: the name of the file; empty: there is none. `fault`: why it holds no rewards."""

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    fault: str = ""


def read_rewards(left: LeftBehind, names: tuple[str, ...] = FILES) -> Rewards:
    """Of the first of these files that is there."""
    for name in names:
        try:
            content = left.read(name, _BYTES)
        except TooLarge as error:
            return Rewards(source=name, fault=str(error))
        if content is not None:
            try:
                return Rewards(_values(content, is_json=name.endswith(".json")), name)
            except (ValueError, RecursionError) as error:
                return Rewards(source=name, fault=f"{name} holds no rewards: {one_line(str(error))}")
    return Rewards(fault="the grader wrote no reward file")


def _values(content: bytes, *, is_json: bool) -> dict[str, float]:
    """Raises ValueError, RecursionError."""
    text = content.decode("utf-8").strip()
    value = json.loads(text) if is_json else float(text)
    if not isinstance(value, Mapping):
        return {REWARD: _number(value)}
    if not 0 < len(value) <= _MOST:
        raise ValueError(f"it has {len(value)} rewards, 1 to {_MOST} are allowed")
    return {valid(name)[:_NAME_CHARS]: _number(number) for name, number in value.items()}


def _number(value: object) -> float:
    """Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a reward must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a reward must be a finite number")
    return number
