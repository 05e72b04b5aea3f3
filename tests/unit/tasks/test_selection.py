"""Filters, order, position, and the part that is never trained on."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tasks import open_tasks
from orchestrator.tasks.base import Source
from orchestrator.tasks.selection import held_out, select, shuffled, tags_of
from orchestrator.types import BadTask, Task

TASKS: list[Task | BadTask] = [
    Task(f"t{n}", "What?", "1", level=str(n % 3), metadata={"tags": ["even" if n % 2 == 0 else "odd"]})
    for n in range(12)
]
TASKS.insert(5, BadTask("bad", "broken"))


def ids(**selection: Any) -> list[str]:
    def read() -> Iterator[Task | BadTask]:
        return iter(TASKS)

    chosen = select(Source("s", read), **selection)
    assert list(chosen) == list(chosen)
    return [task.task_id for task in chosen]


def test_nothing_asked_for_changes_nothing() -> None:
    assert ids() == [task.task_id for task in TASKS]


def test_filters_keep_what_matches_and_report_what_is_bad() -> None:
    assert ids(levels={"1"}) == ["t1", "t4", "bad", "t7", "t10"]
    assert ids(levels=frozenset({"1", "2"}), tags={"odd"}) == ["t1", "bad", "t5", "t7", "t11"]
    assert ids(tags=frozenset({"none such"})) == ["bad"]


def test_count_is_of_good_tasks() -> None:
    assert ids(count=6) == ["t0", "t1", "t2", "t3", "t4", "bad", "t5"]
    assert ids(count=0) == []


def test_a_shuffled_order_depends_on_the_seed() -> None:
    whole = ids(shuffle_seed=3)
    assert whole != ids()
    assert sorted(whole) == sorted(ids())
    assert whole != ids(shuffle_seed=4)


@given(st.integers(0, 60), st.integers(0, 5), st.integers(1, 70))
def test_a_shuffle_loses_and_doubles_nothing(size: int, seed: int, window: int) -> None:
    tasks = [Task(str(n), "What?") for n in range(size)]
    order = [task.task_id for task in shuffled(tasks, seed, window)]
    assert sorted(order, key=int) == [str(n) for n in range(size)]
    assert order == [task.task_id for task in shuffled(tasks, seed, window)]


@pytest.mark.parametrize("tags", [None, "text", 7, [1, None]])
def test_tags_of_another_kind_are_none(tags: object) -> None:
    assert tags_of(Task("t", "What?", metadata={"tags": tags})) == frozenset()


def test_held_out_is_a_fixed_share_of_the_ids() -> None:
    names = [f"task-{n}" for n in range(4000)]
    held = [name for name in names if held_out(name, 0.1)]
    assert 320 <= len(held) <= 480
    assert held == [name for name in names if held_out(name, 0.1)]
    assert set(held) < {name for name in names if held_out(name, 0.2)}
    assert held != [name for name in names if held_out(name, 0.1, seed=1)]
    assert not any(held_out(name, 0.0) for name in names)
    assert all(held_out(name, 1.0) for name in names)


def test_the_stated_split_does_not_change_between_versions() -> None:
    assert [n for n in range(40) if held_out(f"task-{n}", 0.25)] == [11, 12, 15, 17, 29, 33, 34, 35, 37, 38]


@pytest.mark.slow
def test_tasks_are_counted_for_progress_without_those_that_are_bad() -> None:
    def endless() -> Iterator[Task | BadTask]:
        return (Task(f"t{n}", "?") for n in itertools.count())

    listed = Source("s", lambda: iter(TASKS))
    assert listed.count() == 12
    assert select(listed, levels={"1"}).count() == 4
    assert Source("s", endless).count(longest_s=0.05) is None
    known = Source("s", endless, lambda: 500)  # what is known is not read
    assert known.count() == 500
    assert select(known, count=20, shuffle_seed=1).count() == 20
    assert select(known, tags={"odd"}).count() is None
    assert open_tasks("reasoning_gym:chain_sum+gcd?size=12", dataset_path=Path("."), split="").count() == 24
