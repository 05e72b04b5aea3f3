"""What is measured is never trained on, and together the parts are everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.settings.section import Settings
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks import split as split_module
from orchestrator.tasks.base import Source
from orchestrator.tasks.split import evaluation_tasks, training_tasks
from orchestrator.types import BadTask


def source(tmp_path: Path, names: list[str]) -> str:
    rows = [json.dumps({"task_id": name, "question": "What?", "answer": "4"}) for name in names]
    (tmp_path / "tasks.jsonl").write_text("\n".join([*rows, "{torn"]) + "\n")
    return f"jsonl:{tmp_path / 'tasks.jsonl'}"


def env(dataset: str, eval_split: str | None) -> EnvSettings:
    return EnvSettings(dataset=dataset, eval_split=eval_split)


def parts(dataset: str, eval_split: str | None) -> tuple[list[str], list[str]]:
    """Ids of (training, evaluation), bad ones as `bad`."""
    found = []
    for tasks in (training_tasks, evaluation_tasks):
        made = tasks(env(dataset, eval_split))
        found.append(["bad" if isinstance(task, BadTask) else task.task_id for task in made])
    return found[0], found[1]


def test_a_hash_split_is_a_partition_that_stays_when_tasks_come_and_go(tmp_path: Path) -> None:
    names = [f"task-{n}" for n in range(40)]
    dataset = source(tmp_path, names)
    trained, held = parts(dataset, "hash:0.25")
    assert held == [*(f"task-{n}" for n in (11, 12, 15, 17, 29, 33, 34, 35, 37, 38)), "bad"]
    assert sorted([*trained[:-1], *held[:-1]]) == sorted(names)
    assert trained[-1] == "bad"
    again_trained, again_held = parts(source(tmp_path, list(reversed(names[10:]))), "hash:0.25")
    assert set(again_held) <= set(held)
    assert set(again_trained) <= set(trained)


def test_without_a_split_both_see_everything(tmp_path: Path) -> None:
    trained, held = parts(source(tmp_path, ["a", "b"]), None)
    assert trained == held == ["a", "b", "bad"]


def test_a_source_says_which_part_it_is(tmp_path: Path) -> None:
    dataset = source(tmp_path, ["a"])
    made = evaluation_tasks(env(dataset, "hash:0.5"))
    assert made.name == f"{dataset}, the 0.5 held out by hash"


@pytest.mark.parametrize(
    ("dataset", "eval_split", "text"),
    [
        ("jsonl:x.jsonl", "test", "jsonl: has no splits; hold a part out with hash:SHARE"),
        ("python:m:f", "test", "python: has no splits"),
        ("gaia", "validation", "validation is the split to train on"),
        ("hf:some/set?split=test", "test", "test is the split to train on"),
    ],
)
def test_a_split_that_cannot_be_held_out_is_refused_before_anything_is_read(
    dataset: str, eval_split: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "open_tasks", lambda *args, **more: Source("s", lambda: iter(())))
    for tasks in (training_tasks, evaluation_tasks):
        with pytest.raises(ConfigError, match=text):
            tasks(env(dataset, eval_split))


@pytest.mark.parametrize(
    ("dataset", "opened"),
    [
        ("gaia", ("gaia", "test")),
        ("hf:some/set", ("hf:some/set", "test")),
        ("hf:some/set?split=train&config=c", ("hf:some/set?split=test&config=c", "test")),
        ("hf:some/set?config=c&split=train", ("hf:some/set?config=c&split=test", "test")),
    ],
)
def test_a_named_split_is_opened_in_the_place_of_the_other(
    dataset: str, opened: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opening(dataset: str, *, dataset_path: Path, split: str, **_: object) -> Source:
        asked.append((dataset, split))
        return Source("s", lambda: iter(()))

    monkeypatch.setattr(split_module, "open_tasks", opening)
    evaluation_tasks(env(dataset, "test"))
    training_tasks(env(dataset, "test"))
    assert asked == [opened, (dataset, "validation")]


@pytest.mark.parametrize(
    "text", ["hash:0", "hash:1", "hash:0.0", "hash:.00", "hash:-0.1", "hash:nan", "hash:", "a b"]
)
def test_shares_that_hold_out_nothing_or_everything_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"hash:SHARE"):
        EnvSettings(eval_split=text)


@pytest.mark.parametrize("text", ["hash:0.1", "hash:.25", "hash:0.05", "test", "hash"])
def test_shares_and_names_are_taken(text: str) -> None:
    settings: Settings = EnvSettings(eval_split=text)
    assert settings.public()["eval_split"] == text
