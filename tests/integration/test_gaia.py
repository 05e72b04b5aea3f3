"""Synthetic trees of both layouts; the real data may not be shared."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.types import BadTask, Task


def gaia_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "task_id": f"id-{number}",
        "Question": f"Question {number}?",
        "Level": 1 + number % 3,
        "Final answer": str(number),
        "file_name": "",
        "Annotator Metadata": {"Steps": "1.", "Number of tools": "1"},
    } | changes


def old_layout(root: Path, split: str = "validation", **last: Any) -> Path:
    folder = root / "2023" / split
    folder.mkdir(parents=True)
    rows = [gaia_row(0), gaia_row(1, file_name="id-1.txt"), gaia_row(2, **last)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "id-1.txt").write_text("attached")
    return root


def new_layout(root: Path, *, by_level: bool = False) -> Path:
    folder = root / "2023" / "validation"
    folder.mkdir(parents=True)
    (folder / "id-1.txt").write_text("attached")
    rows = [gaia_row(n, Level=str(1 + n % 3), file_path="") for n in range(3)]
    rows[1] |= {"file_name": "id-1.txt", "file_path": "2023/validation/id-1.txt"}
    if by_level:
        for level in "123":
            part = [row for row in rows if row["Level"] == level]
            pq.write_table(pa.Table.from_pylist(part), folder / f"metadata.level{level}.parquet")
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    return root


def read(folder: Path, split: str = "validation") -> list[Task | BadTask]:
    return list(open_tasks("gaia", dataset_path=folder, split=split))


@pytest.mark.parametrize("below", ["", "2023", "2023/validation"])
@pytest.mark.parametrize("layout", ["old", "new", "by level"])
def test_both_layouts_give_the_same_tasks_from_any_of_their_folders(
    tmp_path: Path, layout: str, below: str
) -> None:
    if layout == "old":
        old_layout(tmp_path)
    else:
        new_layout(tmp_path, by_level=layout == "by level")
    tasks = read(tmp_path / below)
    assert [(t.task_id, t.question, t.answer, t.level) for t in tasks if isinstance(t, Task)] == [
        (f"id-{n}", f"Question {n}?", str(n), str(n + 1)) for n in range(3)
    ]
    assert [[a.path.read_text() for a in t.attachments] for t in tasks if isinstance(t, Task)] == [
        [],
        ["attached"],
        [],
    ]


def test_a_parquet_folder_that_was_moved_finds_its_files_beside_the_metadata(tmp_path: Path) -> None:
    new_layout(tmp_path / "a")
    moved = (tmp_path / "a" / "2023" / "validation").rename(tmp_path / "mine")
    assert all(isinstance(task, Task) for task in read(moved))


@pytest.mark.parametrize("path", ["../../../secret", "2023/../../secret", "/etc/passwd", "2023/validation/link"])
def test_a_file_path_that_leaves_the_folder_is_a_bad_task(tmp_path: Path, path: str) -> None:
    root = new_layout(tmp_path / "root")
    (tmp_path / "secret").write_text("secret")
    (root / "2023" / "validation" / "link").symlink_to(tmp_path / "secret")
    row = gaia_row(0, Level="1", file_path=path, file_name=path)
    pq.write_table(pa.Table.from_pylist([row]), root / "2023" / "validation" / "metadata.parquet")
    (bad,) = read(root)
    assert isinstance(bad, BadTask)
    assert bad.task_id == "id-0"


def test_hidden_answers_of_the_test_split_are_bad_tasks(tmp_path: Path) -> None:
    old_layout(tmp_path, "test", **{"Final answer": "?"})
    *_, bad = read(tmp_path, "test")
    assert isinstance(bad, BadTask)
    assert "hidden" in bad.reason


def test_missing_data_offer_the_download(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="orchestrator download-gaia --output-dir"):
            read(folder)


def test_the_folder_of_one_split_is_not_read_as_the_other(tmp_path: Path) -> None:
    old_layout(tmp_path, "test")
    with pytest.raises(ConfigError, match="no GAIA validation data"):
        read(tmp_path / "2023" / "test")
    with pytest.raises(ConfigError, match="no split of GAIA"):
        read(tmp_path, "train")


def test_a_broken_parquet_file_is_refused_at_start(tmp_path: Path) -> None:
    folder = tmp_path / "2023" / "validation"
    folder.mkdir(parents=True)
    (folder / "metadata.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match="cannot read") as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value)
