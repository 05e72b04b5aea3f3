"""The `datasets` library on local files: no network."""

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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


@pytest.mark.slow
def test_cells_of_all_types_are_exact_or_bad_tasks(tmp_path: Path) -> None:
    utc = dt.datetime(2024, 3, 5, 10, 30, tzinfo=dt.UTC)
    cells = {
        "date": (pa.array([dt.date(2024, 3, 5)]), "2024-03-05"),
        "decimal": (pa.array([Decimal("12.50")]), "12.50"),
        "decimal256": (pa.array([Decimal(10**60)], pa.decimal256(70, 0)), str(10**60)),
        "timestamp": (pa.array([utc], pa.timestamp("us", "UTC")), "2024-03-05T10:30:00+00:00"),
        "zone": (pa.array([utc], pa.timestamp("ns", "Europe/Berlin")), "2024-03-05T11:30:00+01:00"),
        "naive": (pa.array([utc.replace(tzinfo=None)], pa.timestamp("ms")), "2024-03-05T10:30:00"),
        "ns": (pa.array([1], pa.timestamp("ns")), None),
        "late": (pa.array([2**40], pa.timestamp("s")), None),
        "time": (pa.array([dt.time(10, 30)], pa.time64("ns")), "10:30:00"),
        "time_ns": (pa.array([3723], pa.time64("ns")), None),
        "duration": (pa.array([5], pa.duration("us")), None),
        "bytes": (pa.array([b"Paris"]), "Paris"),
        "binary": (pa.array([b"\xff"]), None),
        "uint64": (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
        "float": (pa.array([0.1], pa.float32()), "0.1"),
        "half": (pa.array([0.1], pa.float16()), "0.1"),
        "double": (pa.array([0.1]), "0.1"),
        "large": (pa.array([2.0**60]), None),
        "nan": (pa.array([float("nan")]), None),
        "bool": (pa.array([True]), None),
        "struct": (pa.array([{"a": 1}]), None),
        "list": (pa.array([[0.5]], pa.list_(pa.float32())), "0.5"),
        "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
        "null": (pa.array([None], pa.string()), None),
    }
    table = pa.table({"question": ["q"], **{name: column for name, (column, _) in cells.items()}})
    pq.write_table(table, tmp_path / "train.parquet")
    for name, (column, text) in cells.items():
        (task,) = read(f"hf:{tmp_path}?answer={name}")
        if text is None:
            assert isinstance(task, BadTask), name
            assert name == "null" or f"(its column is '{name}')" in task.reason
            kind = {
                "nan": "nan",
                "bool": "bool",
                "struct": "an object",
                "binary": "bytes",
                "null": "missing",
                "late": "timestamp",
                "duration": "timedelta",
            }
            assert kind.get(name, str(column.type)) in task.reason
        else:
            assert isinstance(task, Task), (name, task)
            assert task.answer == text, name


def test_a_folder_whose_files_were_not_fetched_says_so(folder: Path) -> None:
    (folder / "train.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=r"train\.jsonl is a Git LFS pointer .* run `git lfs pull`"):
        read(f"hf:{folder}")


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
