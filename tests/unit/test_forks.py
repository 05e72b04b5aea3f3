"""What `env.branch` may say, and where a trunk is branched from by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import ConfigError
from orchestrator.rules.forks import BranchRule, Fork, forks_of, least_certain
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Completion, Record
from tests.fakes.plans import a_turn


def record(*surprises: float | None) -> Record:
    """A turn for each: the mean of its negative log-probs over two tokens."""
    turns = []
    for n, mean in enumerate(surprises, 1):
        logprobs = None if mean is None else (-mean / 2, -mean * 1.5)
        turns.append(a_turn(sequence=n, completion=Completion("x", "x", "stop", (1, 2), logprobs, 1, 2)))
    return Record(started_at=0.0, turns=tuple(turns))


def test_the_three_rules_are_read() -> None:
    assert BranchRule.parse("turns:4,2 width:3") == BranchRule("turns", 3, (2, 4))
    assert BranchRule.parse("entropy:2 width:1 trunk:masked") == BranchRule("entropy", 1, top=2, trunk_masked=True)
    assert BranchRule.parse("python:my.forks:choose") == BranchRule("python", function="python:my.forks:choose")


@pytest.mark.parametrize(
    "text",
    [
        *("", "turns", "turns:2", "turns:1 width:2", "turns:2,2 width:1", "turns:2 width:0", "entropy:1"),
        *("turns:2 width:1 width:1", "python:no_function", "python:a:b width:2", "turns:2 width:2 trunk:gone"),
        *("width:2 turns:2", "trunk:masked python:a:b", "turns:2 width:99999"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        BranchRule.parse(text)
    with pytest.raises(ConfigError, match=r"^env\.branch: [^\n]+$"):
        EnvSettings(branch=text, group_size=4)


def test_a_group_that_trees_do_not_fill_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(ConfigError, match=r"env\.group_size 8 is not filled by trees of 7; set 7 or 14"):
        EnvSettings(branch="turns:2,4 width:3", group_size=8)
    with pytest.raises(ConfigError, match=r"trees of 7; set 7$"):
        EnvSettings(branch="turns:2,4 width:3", group_size=6)
    with pytest.raises(ConfigError, match=r"set 2$"):
        EnvSettings(branch="python:a:b", group_size=1)
    assert EnvSettings(branch="turns:2,4 width:3", group_size=14).branch_rule == BranchRule("turns", 3, (2, 4))


def test_an_evaluation_has_no_branches() -> None:
    config = Config(env=EnvSettings(branch="turns:2 width:3", group_size=4))
    assert replace(config, env=config.env.for_evaluation()).env.branch is None


def test_turns_that_the_trunk_does_not_have_are_no_forks() -> None:
    assert BranchRule.parse("turns:2,4 width:3").forks(record(1, 1, 1)) == (Fork(2, 3),)


def test_the_least_certain_turns_are_those_of_the_highest_mean() -> None:
    assert least_certain(record(9, 0.1, 0.5, 0.3), 2) == (3, 4)
    assert least_certain(record(9, 0.5, 0.5, 0.5), 2) == (2, 3), "of equal ones the earlier"
    assert least_certain(record(9), 2) == ()
    with pytest.raises(ConfigError, match=r"env\.branch: entropy needs log-probs"):
        least_certain(record(None, None), 1)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "no list"),
        ("23", "no list"),
        ([2], r"not \(turn, width\)"),
        ([(2, 1.0)], "two whole numbers"),
        ([(True, 1)], "two whole numbers"),
        ([(1, 1)], "turns go from 2 to 4"),
        ([(5, 1)], "turns go from 2 to 4"),
        ([(2, 0)], "widths from 1"),
        ([(2, 1), (2, 1)], "twice"),
        ([(2, 3), (3, 3)], "6 branches, and the group has room for 5"),
    ],
)
def test_what_a_function_may_not_answer(answer: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forks_of(answer, 4, 5)


def test_what_a_function_may_answer() -> None:
    assert forks_of([(4, 1), [2, 3]], 4, 5) == (Fork(2, 3), Fork(4, 1))
    assert forks_of((), 4, 5) == ()
