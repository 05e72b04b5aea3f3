"""`orchestrator init`: what it makes, and what it leaves alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.commands.init import TASK_IDS
from orchestrator.demo import recording
from orchestrator.settings.sources import load_config, load_tasks
from orchestrator.types import Task


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the command makes, in an empty cache: made once, as the demo's tokenizer is unpacked for it."""
    place = tmp_path_factory.mktemp("init")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert main(["init", str(place / "start")]) == 0
        yield place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "start", tmp_path / "start"))


def test_the_settings_are_accepted_and_the_tasks_are_the_recording_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config(["--config", "run.yaml"])
    tasks = list(load_tasks(config))
    assert all(isinstance(task, Task) for task in tasks)
    recorded = {task.task_id: task for task in recording.tasks() if isinstance(task, Task)}
    assert {task.task_id for task in tasks} == set(TASK_IDS)
    for task in tasks:
        assert isinstance(task, Task)
        assert (task.question, task.answer) == (recorded[task.task_id].question, recorded[task.task_id].answer)
        assert [a.path.read_bytes() for a in task.attachments] == [
            a.path.read_bytes() for a in recorded[task.task_id].attachments
        ]
    facts = recording.Recording.read()
    theirs = {name: value for name, value in facts.env.items() if name != "scoring_strategy"}
    assert {name: getattr(config.env, name) for name in theirs} == theirs
    assert config.openai[0].base_url.startswith("replay:")


def test_the_readme_has_five_commands(folder: Path) -> None:
    [block] = re.findall(r"```sh\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) == 5
    assert all(line.startswith("orchestrator ") for line in block.splitlines())


def test_a_folder_with_anything_in_it_is_refused_and_an_empty_one_is_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    (folder / "run.yaml").write_text("mine")
    capsys.readouterr()
    assert main(["init", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (folder / "run.yaml").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == before
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty")]) == 0
    assert json.loads((tmp_path / "empty" / "tasks.jsonl").read_text().splitlines()[0])["task_id"] in TASK_IDS
