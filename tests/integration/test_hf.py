"""The `datasets` library on local files: no network."""

import json
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks import open_tasks
from orchestrator.tasks.hf import DEFAULT_SPLIT
from orchestrator.types import BadTask, Task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"problem": f"{n} + 1?", "solution": n + 1, "id": f"p{n}", "file_name": ""} for n in range(5)]
    rows[3]["problem"] = ""
    rows[4]["file_name"] = "picture.png"
    for split in ("train", "test"):
        lines = [json.dumps(row | {"id": f"{split}-{row['id']}"}) for row in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


def read(spec: str, split: str = "train") -> list[Task | BadTask]:
    return list(open_tasks(spec, dataset_path=Path("."), split=split))


def test_columns_are_mapped_and_rows_checked(folder: Path) -> None:
    *good, blank, with_file = read(f"hf:{folder}?question=problem&answer=solution&task_id=id")
    assert [(t.task_id, t.question, t.answer) for t in good if isinstance(t, Task)] == [
        (f"train-p{n}", f"{n} + 1?", str(n + 1)) for n in range(3)
    ]
    assert isinstance(blank, BadTask)
    assert isinstance(with_file, BadTask)
    assert "no folder" in with_file.reason


def test_the_split_in_the_name_wins_over_the_flag(folder: Path) -> None:
    tasks = read(f"hf:{folder}?question=problem&answer=solution&task_id=id&split=test", split="train")
    assert tasks[0].task_id == "test-p0"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("?questions=problem", "no setting 'questions'"),
        ("?question=problem&question=id", "twice"),
        ("?question", "key=value"),
        ("?split=nope", "split 'nope'"),
        ("?question=nope", "no column 'nope'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_start(folder: Path, query: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        read(f"hf:{folder}{query}")
    assert "\n" not in str(refused.value)


def test_a_missing_data_set_is_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load hf:") as refused:
        read(f"hf:{folder}/nowhere")
    assert "\n" not in str(refused.value)


def test_the_only_split_is_taken_where_none_was_asked_for(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    named = f"hf:{folder}?question=problem&answer=solution&task_id=id"
    assert read(named, split="validation")[0].task_id == "train-p0"
    for spec, split in ((f"{named}&split=validation", "train"), (named, "test")):
        with pytest.raises(ConfigError, match="it has no such split, but train"):
            read(spec, split)


def test_of_several_splits_none_is_taken_unasked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no such split, but train, test"):
        read(f"hf:{folder}?question=problem&answer=solution", split="validation")


def test_the_default_split_is_that_of_the_settings() -> None:
    assert EnvSettings().split == DEFAULT_SPLIT
