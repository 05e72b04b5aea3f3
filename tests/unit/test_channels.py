"""Directories of ours can be told to be ours from the first moment on."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch import reaper
from orchestrator.launch.channels import DRAFT_PREFIX, OWNER_FILE, Channels, make_owned_directory
from orchestrator.launch.owner import this_process
from orchestrator.launch.reaper import reap_directories

ME = this_process()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place the reaper looks at."""
    monkeypatch.setattr(reaper.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(reaper, "Path", lambda *parts: tmp_path if parts == ("/tmp",) else Path(*parts))
    return tmp_path


def test_directory_is_private_and_its_name_says_nothing(tmp_path: Path) -> None:
    directory = make_owned_directory("run", tmp_path)
    assert [directory] == list(tmp_path.iterdir())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(os.getpid()) not in directory.name.removeprefix("orchestrator-")
    assert str(ME) in (directory / OWNER_FILE).read_text()


def test_directories_of_the_living_stay(temporary: Path) -> None:
    with Channels("run", temporary):
        (temporary / f"{DRAFT_PREFIX}{ME.pid}-{ME.started}-00000000").mkdir()
        assert reap_directories() == 0
    assert len(list(temporary.iterdir())) == 1


@pytest.mark.parametrize("owner_file", [None, "", '{"owner": "ha'], ids=["none", "empty", "torn"])
def test_directory_whose_maker_died_at_once_is_removed(temporary: Path, owner_file: str | None) -> None:
    draft = temporary / f"{DRAFT_PREFIX}{ME.pid}-{ME.started - 1}-00000000"
    draft.mkdir()
    if owner_file is not None:
        (draft / OWNER_FILE).write_text(owner_file)
    assert reap_directories() == 1
    assert not draft.exists()


@pytest.mark.parametrize("name", ["orchestrator-foreign", f"{DRAFT_PREFIX}x-y-z", f"{DRAFT_PREFIX}1", "other"])
def test_directories_that_are_not_ours_stay(temporary: Path, name: str) -> None:
    (temporary / name).mkdir()
    assert reap_directories() == 0
    assert (temporary / name).exists()


DYING = """
import os, shutil, sys
from pathlib import Path
from orchestrator.launch import channels
directory = channels.make_owned_directory("run", Path(sys.argv[1]))
def die(path, **_):
    (path / channels.OWNER_FILE).unlink()
    os.kill(os.getpid(), 9)
shutil.rmtree = die
channels.remove_owned_directory(directory)
"""


def test_directory_whose_owner_died_while_removing_it_is_removed(temporary: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", DYING, str(temporary)], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert list(left.iterdir()) == [], "not even its owner's name is in it any more"
    assert reap_directories() == 1
    assert list(temporary.iterdir()) == []
