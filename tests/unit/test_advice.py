"""Notes that are given once per machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from orchestrator.host.advice import is_new
from orchestrator.launch.fitting import RUNC, old_runc


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_note_is_new_once_per_machine(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_new("runc 1.1.5"), is_new("runc 1.1.5"), is_new("runc 1.1"), is_new("runc 1.1.5")] == [
        True,
        False,
        True,
        False,
    ]
    monkeypatch.setattr(platform, "node", lambda: "another")  # with the same home
    assert is_new("runc 1.1.5")


@pytest.mark.parametrize("what", ["no folder", "not text", "a folder"])
def test_what_cannot_be_remembered_is_said_again(state: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "no folder":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    else:
        file = state / "rollout-orchestrator" / "advice-given"
        file.mkdir(parents=True)
        if what == "not text":
            file.rmdir()
            file.write_bytes(b"\xff\xfe")
    assert is_new("runc 1.1.5")
    assert is_new("runc 1.1.5")


def test_the_note_on_runc_is_known_by_its_beginning() -> None:
    assert (old_runc("1.1.5") or "").startswith(RUNC)


def test_other_notes_are_always_new(state: Path) -> None:
    assert [is_new("1024 MB of memory"), is_new("1024 MB of memory")] == [True, True]
    assert not state.exists()
