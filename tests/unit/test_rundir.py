"""Files a run leaves: whole lines or none, one owner, torn ends set aside."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.schemas.make import schema
from orchestrator.errors import ConfigError, OutputError, RunLocked
from orchestrator.run import lines as jsonl
from orchestrator.run.directory import RunDirectory, new_run_directory
from orchestrator.run.groups import fresh_path
from orchestrator.run.lines import JsonLines
from orchestrator.run.repair import set_torn_end_aside
from orchestrator.types import BadTask, Group, Task
from tests.fakes.plans import a_member, an_attempt
from tests.fakes.written import write_run


def test_directory_has_one_owner_until_it_is_closed(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    with pytest.raises(RunLocked, match="another orchestrator"):
        RunDirectory(tmp_path / "run")
    first.close()
    first.close()
    RunDirectory(tmp_path / "run").close()


def test_refused_directory_is_not_kept_locked(tmp_path: Path) -> None:
    write_run(tmp_path, an_attempt())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--env\.resume"):
            RunDirectory(tmp_path)
    write_run(tmp_path, an_attempt(attempt=1), resume=True)
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 2


async def test_record_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path, fsync=True)) as run:
        for number, result in enumerate((an_attempt(), a_member(index=1)), 1):
            await run.record(result)
            assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == number
        await run.record_bad_task(BadTask("t", "torn"), 7)
    *_, bad = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert (bad["rollout_id"], bad["outcome"]) == ("g000007", "bad_task")


async def test_why_a_group_was_dropped_is_on_disk_and_a_torn_end_is_set_aside(tmp_path: Path) -> None:
    file, group = tmp_path / "dropped.jsonl", Group(3, Task("t", "?"), (), (), "0 of 2 rollouts usable")
    with closing(RunDirectory(tmp_path)) as run:
        assert not file.exists()
        await run.record_drop(group)
        told = json.loads(file.read_text())
        assert told == {"schema": 1, "group": 3, "task_id": "t", "reason": "0 of 2 rollouts usable"}
        Draft202012Validator(schema("dropped.jsonl")).validate(told)
    with file.open("a") as torn:
        torn.write('{"schema": 1, "gr')
    with closing(RunDirectory(tmp_path, resume=True)) as run:
        await run.record_drop(group)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [told, told]


async def test_description_is_replaced_whole(tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path)) as run:
        await run.describe({"seed": 1})
        await run.describe({"seed": 2})
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "rollouts.jsonl", "run.json"]


def test_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_new_names_are_nobodys(tmp_path: Path) -> None:
    first = new_run_directory(tmp_path)
    first.mkdir()
    assert not new_run_directory(tmp_path).exists()
    names = {fresh_path(tmp_path / "out" / "groups.jsonl").name for _ in range(3)}
    assert names == {"groups.jsonl", "groups_1.jsonl", "groups_2.jsonl"}


def test_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    child = os.fork()
    if child == 0:  # the limit is the process'
        lines = JsonLines(path)
        asyncio.run(lines.append(lambda: [{"n": 1}]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            asyncio.run(lines.append(lambda: [{"n": "x" * 5000}]))
        except OutputError as error:
            os._exit(0 if "cannot write" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == b'{"n":1}\n'


def test_text_that_is_none_becomes_replacement_characters() -> None:
    assert jsonl.dumps({"a": ["\ud800x", 1]}) == '{"a":["\ufffdx",1]}'.encode()


VALUES = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=8)


@given(values=VALUES, cut=st.integers(0, 10_000))
def test_whatever_is_cut_off_whole_lines_stay_and_the_rest_is_aside(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, str]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    whole = b"".join(jsonl.dumps(value) + b"\n" for value in values)
    torn = whole[: cut % (len(whole) + 1)]
    path.write_bytes(torn)
    moved = set_torn_end_aside(path)
    kept = path.read_bytes()
    assert whole.startswith(kept)
    assert kept + torn[len(kept) :] == torn
    assert len(torn) - len(kept) == moved
    assert b"\n" not in torn[len(kept) :]
    aside = Path(f"{path}.torn")
    assert (aside.read_bytes()[:-1] if moved else b"") == torn[len(kept) :]
    assert aside.exists() == bool(moved)


def test_line_of_zeros_after_a_power_loss_goes_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n":1}\n' + b"\0" * 30 + b"\n")
    assert set_torn_end_aside(path) == 31
    assert path.read_bytes() == b'{"n":1}\n'


def test_file_that_is_not_there_lacks_nothing(tmp_path: Path) -> None:
    assert set_torn_end_aside(tmp_path / "lines.jsonl") == 0
    assert not list(tmp_path.iterdir())


def test_long_torn_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":"' + b"x" * (3 << 20))
    set_torn_end_aside(path)
    assert path.read_bytes() == b'{"n":1}\n'


# ---------------------------------------------------------------- the writer's thread


async def test_neither_making_lines_nor_a_slow_disk_holds_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serialising and the disk both wait here for what only a running loop does."""
    ran: dict[str, threading.Event] = {"serialise": threading.Event(), "fsync": threading.Event()}
    loop = asyncio.get_running_loop()

    def needs_the_loop(what: str) -> None:
        loop.call_soon_threadsafe(ran[what].set)
        assert ran[what].wait(30), f"{what} stops the event loop"

    def values() -> list[dict[str, int]]:
        needs_the_loop("serialise")
        return [{"n": 1}]

    monkeypatch.setattr(os, "fsync", lambda fd: needs_the_loop("fsync"))
    with closing(JsonLines(tmp_path / "lines.jsonl", fsync=True)) as lines:
        await lines.append(values)
    assert all(event.is_set() for event in ran.values())


async def test_lines_keep_the_order_of_their_handing_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with closing(JsonLines(path)) as lines:
        await asyncio.gather(*(lines.append(lambda n=n: [n, -n]) for n in range(1, 200)))
    assert [json.loads(line) for line in path.read_text().split()] == [m for n in range(1, 200) for m in (n, -n)]


async def test_what_was_handed_over_is_written_though_nobody_waits_any_more(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    held, lines = threading.Event(), JsonLines(path)

    def first() -> list[int]:
        assert held.wait(30)
        return [1]

    waiting = [asyncio.create_task(lines.append(first)), asyncio.create_task(lines.append(lambda: [2]))]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert path.read_bytes() == b""
    held.set()
    lines.close()
    assert path.read_bytes() == b"1\n2\n"
