"""`env.curriculum pools`: what a round has follows from seed and results alone, and no task is starved."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.schemas.make import schema
from orchestrator.engine.draws import Draw, Draws, Pause
from orchestrator.errors import ConfigError
from orchestrator.rules.pools import NOTHING, RETEST_EVERY, Choice, GroupResult, Pools
from orchestrator.run.directory import RunDirectory
from orchestrator.types import BadTask, Task
from tests.fakes.drawing import Drawing, quarters, tasks, told

# ---------------------------------------------------------------- what is drawn


@settings(deadline=None, max_examples=40)
@given(
    chances=st.lists(st.sampled_from([0.0, 0.02, 0.5, 1.0]), min_size=1, max_size=12),
    lag=st.integers(0, 30),
    open_groups=st.integers(1, 10),
    seed=st.integers(0, 2**31),
)
def test_every_task_comes_at_least_once_in_eight_rounds(
    chances: list[float], lag: int, open_groups: int, seed: int
) -> None:
    rows = tasks(len(chances))
    skill = dict(zip((row.task_id for row in rows), chances, strict=True))
    drawing = Drawing(rows, lambda task, drawn: skill[task], lag, open_groups, random.Random(seed), seed)
    longest = RETEST_EVERY * len(rows)
    last = dict.fromkeys(skill, -1)
    for place, draw in enumerate(drawing.run(4 * longest)):
        last[draw.task.task_id] = place
        assert place - min(last.values()) <= longest


def test_easy_and_hopeless_tasks_are_rare_and_mixed_ones_are_in_every_round() -> None:
    drawing = Drawing(tasks(40), quarters, 10, 5, random.Random(1))
    rounds: dict[int, list[str]] = defaultdict(list)
    for draw in drawing.run(600):
        rounds[draw.epoch].append(draw.task.task_id)
    assert rounds[0] == [f"q{n}" for n in range(40)]
    later = [rounds[n] for n in range(8, 16)]
    # One that was solved, or not solved, by chance again and again may be missing for a while.
    assert sum(f"q{n}" in names for names in later for n in range(2, 40, 4)) > 70
    assert sum(map(len, later)) < 8 * 10 + 40


def test_tasks_keep_the_epochs_and_so_the_seeds_that_they_have_in_a_run_without() -> None:
    uniform = Draws(lambda task: task).several(tasks(8), 400, epoch=None, rounds=True)
    every = {(draw.task.task_id, draw.epoch, draw.again) for draw in uniform if isinstance(draw, Draw)}
    chosen = Drawing(tasks(8), quarters, 4, 2, random.Random(1)).run(60)
    assert {(draw.task.task_id, draw.epoch, draw.again) for draw in chosen} < every
    assert len({(draw.task.task_id, draw.epoch) for draw in chosen}) == len(chosen) == 60


@settings(deadline=None, max_examples=30)
@given(lag=st.integers(0, 40), first=st.integers(1, 12), second=st.integers(1, 12), order=st.integers(0, 2**20))
def test_the_order_of_tasks_does_not_follow_from_which_groups_are_fast(
    lag: int, first: int, second: int, order: int
) -> None:
    one, other = (
        told(Drawing(tasks(11), quarters, lag, open_groups, random.Random(order + open_groups)).run(150))
        for open_groups in (first, second)
    )
    assert one == other


@settings(deadline=None, max_examples=30)
@given(lag=st.integers(0, 30), results=st.integers(0, 120), order=st.integers(0, 2**20))
def test_a_run_that_was_killed_goes_on_with_the_same_tasks(lag: int, results: int, order: int) -> None:
    def drawing(number: int) -> Drawing:
        return Drawing(tasks(9), quarters, lag, 5, random.Random(order + number))

    whole = told(drawing(0).run(120))
    killed, resumed = drawing(1), drawing(2)
    assert told(killed.run(120, killed_at=results)) == whole[: len(killed.made)]
    resumed.pools.resume(lag, killed.journal)
    assert told(resumed.run(120)) == whole


def test_a_round_waits_for_all_results_but_the_last_ones_and_for_those_no_longer() -> None:
    pools = Pools(lambda: 7, lag=1)
    draws = Draws(lambda task: task, pools=pools).several(tasks(3), 9, epoch=None, rounds=True)
    assert [isinstance(next(draws), Draw) for _ in range(3)] == [True] * 3
    assert isinstance(next(draws), Pause)
    pools.settle(1, GroupResult("q1", 4, 2, differ=True))
    assert isinstance(next(draws), Pause)
    pools.settle(0, GroupResult("q0", 4, 4))
    assert isinstance(next(draws), Draw)


# ---------------------------------------------------------------- what moves a pool


def test_only_scored_rollouts_move_a_task() -> None:
    pools = Pools(lambda: 7)
    draws = Draws(lambda task: task, pools=pools).several(tasks(1), 5, epoch=None, rounds=True)
    pool = []
    for result in (NOTHING, GroupResult("q0", 0, 0), GroupResult("q0", 4, 0), GroupResult("q0", 4, 0), NOTHING):
        while not isinstance(draw := next(draws), Draw):
            raise AssertionError("nothing is to be waited for")
        choice = pools.choice(draw.number)
        assert choice is not None
        pool.append(choice.pool)
        pools.settle(draw.number, result)
    assert pool == ["new", "new", "new", "hopeless", "hopeless"]


@pytest.mark.parametrize(
    ("groups", "pool"),
    [
        ([(8, 8)], "easy"),
        ([(8, 0)], "hopeless"),
        ([(8, 0), (8, 0), (8, 1)], "mixed"),  # one of eight: that teaches something
        ([(8, 4), (8, 0)], "mixed"),  # a bad day
        ([(8, 4), (8, 0), (8, 0), (8, 0)], "hopeless"),
        ([(8, 0)] * 9 + [(8, 8)], "mixed"),  # learned
        ([(8, 0)] * 9 + [(8, 8)] * 4, "easy"),
        ([(2, 2)], "mixed"),  # two are too few to tell
        ([(2, 2)] * 4, "easy"),
    ],
)
def test_the_last_groups_count_most(groups: list[tuple[int, int]], pool: str) -> None:
    pools = Pools(lambda: 7)
    for number, (scored, solved) in enumerate(groups):
        assert pools.begin_round(lambda group: False)
        pools.drawn(number, "q0")
        pools.settle(number, GroupResult("q0", scored, solved, 0 < solved < scored))
    assert pools.begin_round(lambda group: False)
    pools.drawn(len(groups), "q0")
    choice = pools.choice(len(groups))
    assert choice is not None
    assert choice.pool == pool


def test_bad_tasks_and_lost_images_are_nobodys_and_hold_up_no_round() -> None:
    def building(task: Task) -> Future[Task | BadTask]:
        looked: Future[Task | BadTask] = Future()
        looked.set_result(BadTask(task.task_id, "it is torn") if task.image == "torn" else task)
        return looked

    pools = Pools(lambda: 7)
    rows = [Task("a", "?", image="torn"), BadTask("b", "no row"), Task("c", "?", image="fine")]
    draws = Draws(lambda task: task, building, pools).several(rows, 4, epoch=None, rounds=True)
    names = []
    for draw in draws:
        assert isinstance(draw, Draw)
        names.append((draw.task.task_id, type(draw.task)))
        if isinstance(draw.task, Task):
            pools.settle(draw.number, GroupResult(draw.task.task_id, 4, 2, differ=True))
    assert sorted(names[:3]) == [("a", BadTask), ("b", BadTask), ("c", Task)]
    assert names[3:] == [("c", Task)] * 3


def test_rounds_without_a_task_end_where_no_task_is_left() -> None:
    def rows() -> Iterator[Task]:
        yield Task("a", "?", image="torn")

    def building(task: Task) -> Future[Task | BadTask]:
        looked: Future[Task | BadTask] = Future()
        looked.set_result(BadTask("a", "it is torn"))
        return looked

    draws = Draws(lambda task: task, building, Pools(lambda: 7))
    assert len(list(draws.several(list(rows()), 4, epoch=None, rounds=True))) == 1


# ---------------------------------------------------------------- on disk


async def test_results_are_read_back_the_first_of_each_group_without_a_torn_end(tmp_path: Path) -> None:
    file = tmp_path / "curriculum.jsonl"
    with closing(RunDirectory(tmp_path)) as run:
        await run.record_result(3, GroupResult("a", 4, 2, differ=True), Choice(1, "mixed", retest=False))
        await run.record_result(3, GroupResult("a", 4, 4), None)
        await run.record_result(4, NOTHING, None)
    for line in file.read_text().splitlines():
        Draft202012Validator(schema("curriculum.jsonl")).validate(json.loads(line))
    with file.open("a") as torn:
        torn.write('{"schema":1,"group":5,"task_id":"b","sco')
    with closing(RunDirectory(tmp_path, resume=True)) as run:
        assert run.results() == {3: GroupResult("a", 4, 2, differ=True), 4: NOTHING}


@pytest.mark.parametrize(
    "line", ["{}", '{"schema":1,"group":-1,"task_id":"b","scored":1,"solved":1,"differ":false}']
)
async def test_a_line_that_is_no_result_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "curriculum.jsonl").write_text(line + "\n")
    with closing(RunDirectory(tmp_path, resume=True)) as run:
        with pytest.raises(ConfigError, match=r"curriculum.jsonl:1 is no result of a group"):
            run.results()
