"""Files a run leaves: whole lines or none, one owner, torn ends set aside."""

from __future__ import annotations

import json
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import jsonl
from orchestrator.errors import ConfigError, OutputError, RunLocked
from orchestrator.jsonl import JsonLines, set_torn_end_aside
from orchestrator.rundir import RunDirectory, new_run_directory
from orchestrator.types import BadTask
from orchestrator.writers import fresh_path
from tests.fakes.plans import a_member, an_attempt


def test_directory_has_one_owner_until_it_is_closed(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    with pytest.raises(RunLocked, match="another orchestrator"):
        RunDirectory(tmp_path / "run")
    first.close()
    first.close()
    RunDirectory(tmp_path / "run").close()


def test_refused_directory_is_not_kept_locked(tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path)) as run:
        run.record(an_attempt())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--env\.resume"):
            RunDirectory(tmp_path)
    with closing(RunDirectory(tmp_path, resume=True)) as run:
        run.record(an_attempt(attempt=1))
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 2


def test_record_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path, fsync=True)) as run:
        for number, result in enumerate((an_attempt(), a_member(index=1)), 1):
            run.record(result)
            assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == number
        run.record_bad_task(BadTask("t", "torn"), 7)
    *_, bad = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert (bad["rollout_id"], bad["outcome"]) == ("g000007", "bad_task")


def test_description_is_replaced_whole(tmp_path: Path) -> None:
    with closing(RunDirectory(tmp_path)) as run:
        run.describe({"seed": 1})
        run.describe({"seed": 2})
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
        lines.append({"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            lines.append({"n": "x" * 5000})
        except OutputError as error:
            os._exit(0 if "cannot write" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == b'{"n":1}\n'


def test_text_that_is_none_becomes_replacement_characters() -> None:
    assert jsonl.dumps({"a": ["\ud800x", 1]}) == '{"a":["\ufffdx",1]}'.encode()


VALUES = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=8)


@settings(max_examples=60, deadline=None)
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
