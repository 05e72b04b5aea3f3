"""Which groups are done, and that a restart goes on exactly behind them."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest

from orchestrator.atropos.feed import Gate
from orchestrator.atropos.position import Ledger, Position, Sending
from orchestrator.atropos.position_files import Checkpoints, read_position, write_position
from orchestrator.atropos.stream import TaskStream
from orchestrator.errors import ConfigError
from orchestrator.types import BadTask, Task

BEGIN = Position(seed=7, dataset="jsonl:x")


def test_gate_opens_once_for_every_span_that_was_entered() -> None:
    gate = Gate(100, 98)
    assert [gate.due(step) for step in (99, 100, 100, 199, 205, 500)] == [None, 100, None, None, 200, 500]


def test_gate_of_one_opens_at_every_step_and_of_none_never() -> None:
    each, never = Gate(1, 0), Gate(0, 0)
    assert [each.due(step) for step in (0, 1, 2, 2, 5)] == [None, 1, 2, None, 5]
    assert [never.due(step) for step in (0, 1, 100)] == [None, None, None]


def test_gate_follows_a_trainer_that_goes_back() -> None:
    gate = Gate(10, 57)
    assert [gate.due(step) for step in (50, 61, 30, 41)] == [None, 60, None, 40]


def test_position_is_behind_all_that_is_done_without_a_gap() -> None:
    ledger = Ledger(BEGIN)
    for number in (1, 0, 4):
        ledger.deliver(number, 1)
    ledger.drop(2)
    position = ledger.delivered_position(5)
    assert (position.following, position.done, position.groups, position.step) == (3, frozenset({4}), 3, 5)
    assert [Ledger(position).is_done(number) for number in range(6)] == [True, True, True, False, True, False]


def test_trainer_took_what_no_longer_waits_in_the_order_of_delivery() -> None:
    ledger = Ledger(BEGIN)
    for number in (0, 2, 1, 3):
        ledger.deliver(number, 1)
    ledger.seen_queue(2, posted=ledger.posted, formed=1, batch=1)
    taken = ledger.taken_position(1)
    assert (taken.following, taken.done, taken.groups) == (1, frozenset({2}), 2)
    assert ledger.delivered_position(1).following == 4


def test_what_is_handed_over_while_the_queue_is_asked_for_does_not_count_as_taken() -> None:
    ledger = Ledger(BEGIN)
    ledger.deliver(0, 1)
    asked = ledger.posted
    ledger.deliver(1, 1)
    ledger.seen_queue(1, posted=asked, formed=1, batch=1)
    assert ledger.taken_position(0).groups == 0


def test_group_with_side_lines_is_taken_with_its_last_line() -> None:
    ledger = Ledger(BEGIN)
    ledger.deliver(0, 3)
    ledger.seen_queue(1, posted=ledger.posted, formed=1, batch=1)
    assert not Ledger(ledger.taken_position(0)).is_done(0)
    ledger.seen_queue(0, posted=ledger.posted, formed=1, batch=1)
    assert Ledger(ledger.taken_position(0)).is_done(0)


def test_forgotten_groups_are_lost_and_counted_once() -> None:
    ledger = Ledger(BEGIN)
    for number in range(5):
        ledger.deliver(number, 1)
    ledger.seen_queue(2, posted=ledger.posted, formed=1, batch=1)
    assert ledger.forgotten() == 2
    assert ledger.forgotten() == 0
    assert (ledger.groups, ledger.lost) == (3, 2)
    ledger.deliver(5, 1)
    ledger.seen_queue(0, posted=ledger.posted, formed=1, batch=1)
    assert ledger.taken_position(0).groups == 4


def test_batches_that_were_formed_together_are_lost_too_unless_new_ones_were_formed() -> None:
    ledger = Ledger(BEGIN)
    for number in range(7):
        ledger.deliver(number, 1)
    ledger.seen_queue(1, posted=ledger.posted, formed=3, batch=2)
    ledger.seen_queue(1, posted=ledger.posted, formed=0, batch=2)
    assert ledger.forgotten() == 5, "one in the queue, two batches of two; the third was given out at once"
    for number in range(7, 13):
        ledger.deliver(number, 1)
    ledger.seen_queue(2, posted=ledger.posted, formed=2, batch=2)
    ledger.seen_queue(0, posted=ledger.posted, formed=1, batch=2)
    assert ledger.forgotten() == 0


def test_position_reads_back_as_it_was_written(tmp_path: Path) -> None:
    position = Position(seed=9, dataset="gaia", step=4, following=7, done=frozenset({9, 12}), groups=9)
    write_position(tmp_path / "deep" / "p.json", position)
    assert read_position(tmp_path / "deep" / "p.json") == position
    assert read_position(tmp_path / "none.json") is None


@pytest.mark.parametrize("text", ["", "{torn", "[]", "{}", '{"schema": 99}', '{"schema": 1, "seed": "x"}'])
def test_broken_position_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match="remove it to begin anew"):
        read_position(tmp_path / "p.json")


def test_checkpoint_is_chosen_by_the_trainers_step(tmp_path: Path) -> None:
    files = Checkpoints(str(tmp_path), "env")
    for step in (10, 20):
        taken = Position(seed=7, dataset="d", step=step, following=step)
        files.save(step, taken, Position(seed=7, dataset="d", step=step, following=step + 5))
    latest = Position(seed=7, dataset="d", step=23, following=40)
    files.save_latest(latest)

    def following(step: int, *, same: bool = False) -> int | None:
        position = files.load(step, same_trainer=same)
        return None if position is None else position.following

    assert following(0) is None, "a run that begins has no past"
    assert following(9) is None
    assert following(10) == 10
    assert following(22) == 20, "back at a checkpoint: what had been taken by then"
    assert following(23, same=True) == 40, "the same trainer: behind what was delivered"
    assert following(23) == 20, "another run-api at that step: what waited there is gone"
    assert following(24) == 40


def test_delivery_under_way_is_on_disk_until_its_end_is_known(tmp_path: Path) -> None:
    ledger = Ledger(BEGIN)
    ledger.sending = Sending(3, 1, "abc", 0, "env_0", 5, 2)
    write_position(tmp_path / "position.json", ledger.delivered_position(5), fsync=True)
    found = read_position(tmp_path / "position.json")
    assert found is not None
    assert found.sending == ledger.sending
    again = Ledger(found)
    assert again.taken_position(5).sending is None, "a trainer that goes back gets it again"
    assert not again.is_done(3)
    again.drop(2)
    assert again.sending is not None
    again.deliver(3, 1)
    assert again.delivered_position(5).sending is None
    assert again.is_done(3)


def test_position_of_an_older_version_has_nothing_under_way(tmp_path: Path) -> None:
    told = BEGIN.as_json()
    del told["sending"]
    (tmp_path / "p.json").write_text(json.dumps(told))
    assert read_position(tmp_path / "p.json") == BEGIN


async def test_stream_numbers_rounds_skips_what_is_done_and_gives_returned_items_first() -> None:
    seen: list[tuple[str, int]] = []
    rows = [Task("a", "?"), BadTask("bad", "torn"), Task("b", "?")]
    done = Position(seed=7, dataset="d", following=1)

    async def bad_task(task: BadTask, number: int) -> None:
        seen.append((task.task_id, number))

    stream = TaskStream(rows, Ledger(done).is_done, bad_task)
    first, second = await stream.next(), await stream.next()
    assert [(i.task.task_id, i.number, i.epoch) for i in (first, second)] == [("b", 2, 0), ("a", 3, 1)]
    assert seen == [("bad", 1)]
    stream.put_back(second)
    stream.put_back(first)
    again = [await stream.next() for _ in range(3)]
    assert [(i.number, i.returned) for i in again] == [(2, 1), (3, 1), (4, 0)]


async def test_stream_without_a_good_task_is_refused() -> None:
    async def bad_task(task: BadTask, number: int) -> None:
        """It is seen elsewhere."""

    stream = TaskStream([BadTask("bad", "torn")], lambda number: False, bad_task)
    with pytest.raises(ConfigError, match="no task"):
        await stream.next()


async def test_stream_comes_without_tasks_whose_images_no_sandbox_can_be_made_of() -> None:
    seen: list[str] = []

    async def bad_task(task: BadTask, number: int) -> None:
        seen.append(f"{number} {task.reason}")

    def building(task: Task) -> Future[Task | BadTask]:
        looked: Future[Task | BadTask] = Future()
        looked.set_result(BadTask(task.task_id, "it is torn") if task.image == "torn" else task)
        return looked

    torn, fine = Task("a", "?", image="torn"), Task("b", "?", image="fine")
    stream = TaskStream([torn, fine], lambda number: False, bad_task, building=building)
    assert [(await stream.next()).task for _ in range(3)] == [fine] * 3
    assert seen == ["0 it is torn"]
    with pytest.raises(ConfigError, match="no task"):
        await TaskStream([torn], lambda number: False, bad_task, building=building).next()
